"""`kvconvert eval --task`: problems whose answers can be checked."""
