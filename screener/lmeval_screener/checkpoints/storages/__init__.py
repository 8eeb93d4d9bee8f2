"""Storages beside the Hub and the disk: object stores, web servers, buckets, MLflow; modules are private."""
