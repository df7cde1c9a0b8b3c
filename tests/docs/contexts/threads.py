"""``engine(sender)`` and ``worker(handle, rank)``, each in a thread."""

import threading

# block

sender = blocking.Sender(1)
sending = threading.Thread(target=engine, args=(sender,))
sending.start()
assert worker(sender.handle, 0) == {"step": 0}
sending.join()
