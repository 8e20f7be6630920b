"""``cloud-server doctor``: would a server with this configuration serve, and be safe?

command  the command line
looks    what is looked at

May import everything but transport. Nothing is listened to or changed.
"""
