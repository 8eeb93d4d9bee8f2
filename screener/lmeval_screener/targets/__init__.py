"""What a user asks to screen: names, families, training runs, the demo. Its modules are private."""
