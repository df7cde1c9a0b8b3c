"""``address`` is one of this host; a sender ``chan`` is made."""

import asyncio

import aioarena

address = "127.0.0.1"
# block
assert chan.handle.readers == 5
assert chan.handle.local_readers == 4
asyncio.run(chan.aclose())
