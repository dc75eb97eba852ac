"""A trained draft as a Hugging Face directory, and such a directory as a draft again."""
