"""What people see: text, progress, tables.

text                numbers as text; text from elsewhere, made fit to be shown
progress            how far it is, on standard error
observation_table   what observers found

May import nothing of the client, and no torch.
"""
