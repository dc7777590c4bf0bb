"""Failures of replicas, of the store, and of object storage, under the load of agents."""
