"""Metrics are served at a port, here at any that is free."""

import prometheus_client

_start = prometheus_client.start_http_server
prometheus_client.start_http_server = lambda port: servers.append(_start(0, addr="127.0.0.1"))
servers = []
# block
for server, thread in servers:
    server.shutdown()
    server.server_close()
    thread.join()
