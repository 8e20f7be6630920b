"""The commands of ``edge-client``, one per file, and what they share. Nothing else imports this package.

The commands are those that `arguments` lists: each has a file of its name with `main(options)`. To add one, write that
file, and its name and options in `arguments`.

arguments   the commands and their options; loads nothing, so that ``--help`` is quick
common      options that several commands have
kinds       what the text of an option may be
credentials options by which a command proves who it is
server      --server, and what stands for it
loading     model, inputs and cut from them
feed        what run is fed with
outcome     what became of one input
pace        how long requests took, and how many a second
kept        outputs that are saved
auto        run with --split auto
run_journal run with --journal
witnesses   run with --witness
speaking    generate and chat: the model and how it writes, from them
looking     run with --dashboard and --sink
compare_benches  compare, where both are of bench
report, heat_maps, output   what is printed and written
exits       exit statuses
"""
