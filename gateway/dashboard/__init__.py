"""The live page on the admin port: what the report says, as it happens."""
