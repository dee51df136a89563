"""What is known about each operator, in one table: its scratch, its shapes, and how that is known.

facts_of returns the facts of an operator. An operator without a rule has unknown scratch and unknown sizes of results.
Views are recognised by their schema and need no entry.
"""

from memcheck.simulated.facts import collectives, elementwise, indexing, memcheck_operators, products, reductions
from memcheck.simulated.scratch import facts_of, scratch_of

__all__ = ["facts_of", "scratch_of"]

# Each adds its operators to the table.
FAMILIES = [collectives, elementwise, memcheck_operators, products, reductions, indexing]
