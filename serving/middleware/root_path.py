"""--root-path: a proxy in front may strip its prefix from paths or leave it there."""

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Lets every path begin with the root path, whether or not the proxy has taken it away.

    Where there is a page, the root path alone leads on to itself with a slash, below which the page's own
    files are found; elsewhere it is an unknown path, which asks for a key as all do.
    """

    def __init__(self, app: ASGIApp, root_path: str, has_page: bool) -> None:
        self.app = app
        self.root_path = root_path
        self.has_page = has_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        is_root = bool(self.root_path) and path == self.root_path
        if is_root and self.has_page:
            await RedirectResponse(self.root_path + "/")(scope, receive, send)
            return
        if not is_root and not path.startswith(self.root_path + "/"):
            scope["path"] = self.root_path + path
            scope["raw_path"] = self.root_path.encode() + scope.get("raw_path", path.encode())
        scope["root_path"] = self.root_path
        await self.app(scope, receive, send)
