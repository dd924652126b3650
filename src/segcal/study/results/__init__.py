"""What a study leaves behind: the results document, tables, pictures."""
