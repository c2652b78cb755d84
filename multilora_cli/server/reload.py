"""SIGHUP: the fleet file is read again and served, by the rules of `mlora apply`."""

import asyncio
import logging
from collections.abc import Callable

from multilora_cli.errors import MloraError
from multilora_cli.server.bodies import FleetBody
from multilora_cli.server.fleet_apply import FleetApply
from multilora_cli.server.metrics import Metrics

_log = logging.getLogger(__name__)
Reread = Callable[[], FleetBody]  # the file as it is now; raises MloraError


class Reload:
    """Serves the file once whoever asked has stopped asking: signals of one moment are one."""

    def __init__(self, fleet: FleetApply, metrics: Metrics, reread: Reread) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._reread = reread

    async def run(self, asked: asyncio.Event) -> None:
        """Until it is cancelled."""
        while True:
            await asked.wait()
            asked.clear()
            try:
                outcome = await self.once()
            except Exception:  # a fault in one attempt must not end the next ones
                _log.exception("reading the fleet file again failed")
                outcome = "refused"
            self._metrics.reloaded(outcome)

    async def once(self) -> str:
        """One attempt: `applied`, or `refused`, and then nothing was changed."""
        try:
            body = await asyncio.to_thread(self._reread)
            report = await self._fleet.apply(body)
        except MloraError as error:
            hint = f" ({error.hint})" if error.hint else ""
            _log.error("the fleet file is not served: %s%s", error.message, hint)
            return "refused"
        _log.warning("the fleet file was read again: %d changed", len(report["changes"]))
        return "applied"
