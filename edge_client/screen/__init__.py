"""What people see: text, progress, tables.

text               numbers as text; foreign text, made safe to show; rows as columns, `Tabular`
progress           progress on standard error
observation_table  what observers found

May import nothing of the client, and no torch.
"""
