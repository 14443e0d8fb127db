"""What a server offers and what it refuses."""

from dataclasses import dataclass
from ipaddress import ip_address

from trilobite.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """host, port: where to listen    api_key: what clients have to know, None = nothing

    queue: requests that may wait for a slot    seconds: longest time of a request    body: its most bytes
    origins: web pages of other servers that may ask (CORS)
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    queue: int = 64
    seconds: float = 600.0
    body: int = 2**20
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise SettingError for a server that anybody could use."""
        if self.api_key == "":
            raise SettingError(
                "--api-key is empty; give one that nobody guesses, or leave it out on this machine"
            )
        if not self.local and self.api_key is None:
            raise SettingError(
                f"--host {self.host}: other machines could use this server; give it an --api-key that clients "
                "have to know"
            )

    @property
    def local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return self.host == "localhost" or ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False
