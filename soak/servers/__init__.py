"""Run real inference servers behind the proxy, with a tiny model of random weights."""
