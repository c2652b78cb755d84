"""What the fleet file says of the front process, checked before anything is fetched or started."""

from multilora_cli.errors import FleetError
from multilora_cli.fleet.load import LoadedFleet, resolve_secret
from multilora_cli.server.config import ServerConfig


def check_front(loaded: LoadedFleet, *, elsewhere: bool = False) -> list[str]:
    """Address and keys, as the server checks them; a key that cannot be had here is a fault here
    and a note elsewhere. Raises BadInput, FleetError."""
    server, notes = loaded.fleet.server, []
    for reference in server.secrets:
        try:
            resolve_secret(reference, loaded.folder)
        except FleetError as error:
            if not elsewhere:
                raise
            notes.append(f"serve would refuse on this machine: {error.message}")
    ServerConfig(
        base_name=loaded.fleet.base.served_name,
        base_path=loaded.folder,
        vocab_size=1,
        host=server.host,
        port=server.port,
        api_keys=tuple(
            each.key for each in server.keys
        ),  # their names: whether there are any is what counts
        admin_key=server.admin_key,
    )
    return notes
