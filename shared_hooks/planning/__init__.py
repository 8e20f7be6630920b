"""From a recording to cuts: what crosses where.

planner   plans made and kept, by signature and path
part      the weights of one part in memory, the others in their files
plan      layers, cuts, a digest to agree on
cutting   frontier -> description, and captures for the head; cuts after a set of calls
lengths   cuts of sizes that were never planned

May import recording, forward, state, models, crossing, lifecycle, modules, tensors, errors; nothing of the tail.
"""

from shared_hooks.planning.cutting import UNSEEN, Branch, Capture, Cutting, blocks, last_layer
from shared_hooks.planning.lengths import MovingSizes, Rule, Size, SizedCrossing, Terms, value_at
from shared_hooks.planning.part import OnlyPart
from shared_hooks.planning.plan import Cut, Follower, HeadWalk, LayerInfo, Plan, PlanLayers, members
from shared_hooks.planning.planner import Loads, Planner

__all__ = [
    "UNSEEN",
    "Branch",
    "Capture",
    "Cut",
    "Cutting",
    "Follower",
    "HeadWalk",
    "LayerInfo",
    "Loads",
    "MovingSizes",
    "OnlyPart",
    "Plan",
    "PlanLayers",
    "Planner",
    "Rule",
    "Size",
    "SizedCrossing",
    "Terms",
    "blocks",
    "last_layer",
    "members",
    "value_at",
]
