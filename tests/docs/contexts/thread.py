"""``handle`` and ``rank`` of a blocking receiver, whose sender sends a few messages and closes."""

import threading

from aioarena import blocking


def send(chan):
    with chan:
        for step in range(3):
            chan.send(step)


chan = blocking.Sender(1)
sending = threading.Thread(target=send, args=(chan,))
sending.start()
handle, rank = chan.handle, 0
# block
sending.join()
