"""What an audit says: the report, its sentences and charts, documents, results. Its modules are private."""
