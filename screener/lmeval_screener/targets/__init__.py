"""The checkpoints that a user names: repositories, addresses, folders of training runs, families."""
