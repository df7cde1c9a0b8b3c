"""What Prometheus scrapes of a sender and two readers in this process, of which one lags.

Run it:     python examples/metrics.py      (needs the extra: pip install 'aioarena[prometheus]')
Expect:     the samples of the sender and of reader 1, and at the end how far behind that is.
"""

import asyncio
import urllib.request

import torch
from prometheus_client import CollectorRegistry, start_http_server

from aioarena import Receiver, Sender
from aioarena.integrations import prometheus


async def main() -> None:
    registry = CollectorRegistry()  # or none, for the one that all of prometheus_client's metrics are in by default
    prometheus.install(registry, histograms=True)
    server, thread = start_http_server(0, "127.0.0.1", registry)  # port 0: any that is free
    async with (
        Sender(2, name="steps") as chan,
        Receiver(chan.handle, 0) as reader,
        Receiver(chan.handle, 1) as laggard,
    ):
        for step in range(10):
            await chan.send({"step": step, "pixels": torch.zeros(20 << 20, dtype=torch.uint8)})
            kept = await reader.recv()  # until the next one
            await laggard.recv()
        for step in range(100):
            await chan.send({"step": step})
            await reader.recv()
            if step < 60:
                await laggard.recv()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        del kept
    server.shutdown()
    server.server_close()
    thread.join()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name, value in samples.items():
        if "_bucket" not in name and "_created" not in name and 'rank="0"' not in name:
            print(name, value)
    sent = float(samples['aioarena_sender_messages_total{channel="steps"}'])
    behind = float(samples['aioarena_reader_messages_behind{channel="steps",rank="1"}'])
    print(f"scraped: {sent:.0f} messages sent, reader 1 is {behind:.0f} behind")


if __name__ == "__main__":
    asyncio.run(main())
