"""Storages beside the Hub and the disk: object stores, web servers, buckets, MLflow; modules are private."""

#: Which service a scheme of an address means.
SERVICES = {
    **dict.fromkeys(("s3", "s3a"), "S3"),
    **dict.fromkeys(("gs", "gcs"), "Google Cloud Storage"),
    **dict.fromkeys(("az", "azure", "abfs", "abfss"), "Azure"),
}
