"""Compare two versions of the proxy: ``python -m bench.compare --before CHECKOUT``.

Both versions run as servers and get the same traffic, one request at a time. The tool compares the bytes that each
version sends to its upstream and returns to its client, the records of the requests, and the metrics.
"""
