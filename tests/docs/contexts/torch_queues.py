"""``pixels``, and ``received`` in the end."""

import torch
import torch.multiprocessing

pixels = torch.rand(1024, 1024)
# block
assert all(torch.equal(message["pixel_values"], pixels) for message in received)
del received
for queue in queues:
    queue.close()
    queue.join_thread()
