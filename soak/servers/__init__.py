"""Real inference servers behind the proxy, each with a tiny model of random weights that is made on the spot."""
