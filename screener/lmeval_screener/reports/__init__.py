"""What a screening says: lines as it goes, the answer, the report, the listings. Its modules are private."""
