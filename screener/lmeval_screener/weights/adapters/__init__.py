"""PEFT adapters: which modules they change, and the rows of the merged model."""
