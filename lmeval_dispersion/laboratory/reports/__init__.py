"""What a study says: answers, charts, documents, results. Its modules are private."""
