"""The processes of environments: which of them an environment goes to, and those that take no more of them."""

from dataclasses import asdict, dataclass

from spmdrl.env.base import PoolSettings
from spmdrl.workers.processes import Listener, Process, Processes

GRACE = 1.0
"""Seconds that a process may be silent after its deadline."""


class PoolError(RuntimeError):
    """Processes for environments cannot be started."""


@dataclass(eq=False)
class Host(Process):
    """A process of environments."""

    holds: int = 0
    """Environments in it."""
    hung: bool = False
    """A call in it goes on beyond its limit."""


class Hosts(Processes[Host]):
    """A fixed number of processes for environments, and those that end with the environments that they hold."""

    def __init__(self, count: int, settings: PoolSettings, listener: Listener):
        """Start the processes, without waiting for them."""
        # Sets of texts have one order in all processes, and a replay meets the order that it met before.
        fixed = {"PYTHONHASHSEED": "0"}
        super().__init__(count, Host, "spmdrl.env.worker", asdict(settings), listener, GRACE, fixed, settings.python)

    def enter(self, process: Host | None) -> Host:
        """Count an environment in, of this process or else of that with the fewest, and return the process."""
        process = process or min((each for each in self.all if not each.retired), key=lambda each: each.holds)
        process.holds += 1
        return process

    def leave(self, process: Host) -> None:
        """Count an environment out. A retired process is killed with the last."""
        process.holds -= 1
        if process.retired and not process.holds:
            self.replace(process)

    def retire(self, process: Host) -> None:
        """Put a fresh process in the place of one in which a call hangs. It is killed once it holds no environment."""
        if not process.retired:
            self.all[self.all.index(process)] = self._spawn()
            self.all.append(process)
        process.retired = process.hung = True
        if not process.holds:
            self.replace(process)

    def aside(self) -> Host:
        """Start a further process, which is retired from the beginning."""
        process = self._spawn()
        process.retired = True
        self.all.append(process)
        return process
