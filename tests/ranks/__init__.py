"""Rank pool: processes that are started once per pytest session and run test bodies as ranks of a world.

    from ranks import Rank, on_ranks

    @on_ranks(2, 4)
    def test_all_reduce_sums_over_ranks(rank: Rank):
        '''An all-reduce leaves the sum on every rank.'''
        value = torch.ones(3)
        dist.all_reduce(value)
        assert value[0] == rank.world_size

or, where the test wants the results of the ranks, with the session fixture ``ranks``::

    def test_ranks_differ(ranks):
        assert ranks(4, own_number, 10) == [10, 11, 12, 13]

    def own_number(rank: Rank, offset: int) -> int:
        return rank.rank + offset

How it works, from the outside in:

- ``pool.py``     RankPool, the ``ranks`` fixture: one world per size; turns outcomes into a test failure
- ``world.py``    World: the processes of one world as pytest sees them: send a job, wait, dump stacks, kill
- ``nursery.py``  one process that has imported torch and forks ranks, so that worlds start in 0.2 s, not 3 s
- ``worker.py``   what a rank runs: join the process group, then run one body after the other
- ``outcome.py``  what became of a body on one rank
- ``rank.py``     Rank, the first argument of every body; ``on_ranks``
"""

from ranks.outcome import Outcome, RanksFailed
from ranks.pool import RankPool
from ranks.rank import Rank, on_ranks

__all__ = ["Outcome", "Rank", "RankPool", "RanksFailed", "on_ranks"]
