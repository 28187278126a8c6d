"""The gateway's commands, one module each."""
