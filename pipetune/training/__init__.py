"""What one training step is: used by trials and by the import helpers alike, so that they cannot differ."""
