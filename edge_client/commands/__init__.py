"""Implement the commands of ``edge-client``. Nothing else imports this package.

The commands are those that `arguments` lists: each is a function in `tasks`, or has a file of its name with
`main(options)`. To add one, write that, and add its name and options to `arguments`.

arguments        the commands and their options; loads nothing, so that ``--help`` is quick
common           options that several commands share; run with --dashboard, --sink
feed             inputs, models and cuts from the command line; the rate of a run
tasks            commands that run one task, and print and write its result
report           outcomes of inputs, printed and written
light            run with --heads: loads no torch
run_files        run with --journal, --output and --heat-maps
auto             run with --split auto
speaking         generate, chat and serve: the model, and its output
"""
