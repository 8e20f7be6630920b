"""The commands of ``edge-client``, one per file, and what they share. Nothing else imports this package.

layers, verify, run, watch, hooks, profile, plan, sweep, compare, hierarchy, prune   the commands
arguments   the arguments of the command line
loading     model, inputs and cut from them
constraints limits, from them
units       sizes, rates and durations
auto        run with --split auto
witnesses   run with --witness
report, layer_table, hierarchy_tree, heat_maps, output   what is printed and written
exits       exit statuses
"""
