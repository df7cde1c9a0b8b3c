"""The channel without I/O: no await, no thread, no socket, no clock, no torch.

Every call returns at once and says what to do instead of doing it: a record or None, "no room", "wake these". The
fronts (:mod:`aioarena.sender`, :mod:`aioarena.receiver`) do the waiting and the waking. Memory comes in as any
writable buffer: a ``bytearray`` in tests, a mapped segment in use.

    layout.py    where each word of the control segment lies, who writes it and who reads it
    words.py     loads, stores and fences of those words, and what order they keep
    ring.py      records of the byte ring; park and wake-up for both sides
    spans.py     the table of spans that the sender leaves for onlookers
    arena.py     slots and spans; generations; who still holds what
    record.py    how one message is laid out: placements and the bytes between them
    sender.py    SenderCore: ring + arena + members, one message at a time
    receiver.py  ReceiverCore: the same from a reader's side
    ahead.py     AheadReader: reads at a seat, inside the sender, for a reader on another host

Modules here import the standard library, :mod:`aioarena.exceptions` and each other, downwards in this list.
"""
