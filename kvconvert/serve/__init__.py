"""`kvconvert serve`: an Engine behind the HTTP interface that OpenAI's clients speak."""
