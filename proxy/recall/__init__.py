"""Search and read archived messages, for the model that they were removed from."""
