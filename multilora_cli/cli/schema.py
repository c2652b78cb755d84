"""`mlora schema`: JSON Schema of the fleet file."""

from multilora_cli.cli.console import Console


def schema() -> None:
    """Print the JSON Schema of a fleet file, for editors and checks."""
    from multilora_cli.fleet.load import fleet_json_schema

    Console().raw(fleet_json_schema())
