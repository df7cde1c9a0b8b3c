"""Channels between hosts.

At the sender (``serving.py``) each remote reader has a seat like a local one. The sender's own process reads the ring for
it (``_core/ahead.py``) and sends what it reads as a stream of bytes (``stream.py``) over an encrypted connection
(``_platform/network.py``). The reader's tail moves when it acknowledges, so that flow control, diagnosis and the release
of slots are those of local readers, and what a cut connection lost is read again.

At the reader (``feed.py``, ``mirror.py``, ``../relay.py``) the bytes go from the socket into the ring and the arena of a
channel of its own, whose readers are ordinary ones: N processes for a relay, the one end itself for a remote ``Receiver``.
"""
