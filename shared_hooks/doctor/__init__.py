"""What ``doctor`` looks at on either side: each finding one line, with how to mend it.

finding       one of them, and all of them on the screen
certificates  certificates and keys in files
machine       processor, memory, sensors, clock
"""

from shared_hooks.doctor.finding import Finding as Finding
from shared_hooks.doctor.finding import Level as Level
from shared_hooks.doctor.finding import as_json as as_json
from shared_hooks.doctor.finding import contained as contained
from shared_hooks.doctor.finding import counts as counts
from shared_hooks.doctor.finding import ok as ok
from shared_hooks.doctor.finding import report as report
from shared_hooks.doctor.finding import warning as warning
from shared_hooks.doctor.finding import wrong as wrong
