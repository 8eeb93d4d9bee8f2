"""What a screening says: the answer, the report, the listings. Its modules are private."""
