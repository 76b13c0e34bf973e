//! Which scope each method needs: the table beside the one of `dispatch`.

use serde::Deserialize;

use crate::auth::{Identity, Scope, Scopes};
use crate::error::RpcError;

/// Methods that every accepted client may use: they concern its own session, or tell of the machine
/// what the handshake tells anyway.
const FREE: &[&str] = &[
    "initialize",
    "session/end",
    "environment/info",
    "environment/status",
];

/// Methods that look at processes and change nothing.
const OBSERVE: &[&str] = &[
    "process/list",
    "process/read",
    "process/snapshot",
    "process/wait",
    "process/waitFor",
];

/// Methods that read files, or what the machine is set up like.
const READ: &[&str] = &[
    "capabilities/discoverV2",
    "capabilityRoots/discoverV1",
    "environmentConfig/read",
    "fs/canonicalize",
    "fs/close",
    "fs/getMetadata",
    "fs/hash",
    "fs/open",
    "fs/readBlock",
    "fs/readDirectory",
    "fs/readFile",
    "fs/search",
    "fs/unwatch",
    "fs/walk",
    "fs/watch",
    "fs/watchMissing",
];

/// Refuses a method that the identity's scopes do not cover.
pub(crate) fn check(
    identity: &Identity,
    method: &str,
    params: Option<&str>,
) -> Result<(), RpcError> {
    if identity.scopes == Scopes::ALL {
        return Ok(());
    }
    let allowed = |scope| identity.scopes.contains(scope);
    match needed(method, params) {
        None => Ok(()),
        // A handle is closed by whoever could open it.
        Some(Scope::FsRead) if method == "fs/close" && allowed(Scope::FsWrite) => Ok(()),
        Some(scope) if allowed(scope) => Ok(()),
        Some(scope) => Err(RpcError::invalid_request(format!(
            "`{method}` needs the scope `{scope}`, which this token does not have"
        ))),
    }
}

/// The scope that a method needs; what is not listed counts as the most that its family can do.
fn needed(method: &str, params: Option<&str>) -> Option<Scope> {
    if FREE.contains(&method) {
        None
    } else if OBSERVE.contains(&method) {
        Some(Scope::Observe)
    } else if READ.contains(&method) {
        let writes = method == "fs/open" && opens_to_write(params);
        Some(if writes {
            Scope::FsWrite
        } else {
            Scope::FsRead
        })
    } else if method.starts_with("fs/") {
        Some(Scope::FsWrite)
    } else {
        Some(Scope::Exec)
    }
}

/// Whether a request changes files; blocks of one that is open count when it is opened.
pub(crate) fn changes_files(method: &str, params: Option<&str>) -> bool {
    method.starts_with("fs/")
        && method != "fs/writeBlock"
        && needed(method, params) == Some(Scope::FsWrite)
}

/// Whether the params of `fs/open` ask for anything but reading.
fn opens_to_write(params: Option<&str>) -> bool {
    #[derive(Deserialize)]
    struct Open {
        #[serde(default)]
        mode: Option<String>,
    }
    match serde_json::from_str::<Open>(params.unwrap_or("null")) {
        Ok(open) => open.mode.is_some_and(|mode| mode != "read"),
        // The method itself will refuse it, and say why.
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(scopes: &str) -> Vec<&'static str> {
        let identity = Identity {
            name: "test".into(),
            scopes: scopes.parse().unwrap(),
        };
        [
            "initialize",
            "environment/info",
            "process/list",
            "process/start",
            "process/terminate",
            "command/exec",
            "http/request",
            "fs/readFile",
            "fs/writeFile",
            "fs/close",
            "fs/unheardOf",
            "unheard/of",
        ]
        .into_iter()
        .filter(|method| check(&identity, method, None).is_ok())
        .collect()
    }

    #[test]
    fn each_scope_opens_its_own() {
        let free = ["initialize", "environment/info"];
        let with = |more: &[&'static str]| [&free[..], more].concat();
        assert_eq!(allowed(""), free);
        assert_eq!(allowed("observe"), with(&["process/list"]));
        assert_eq!(allowed("fs:read"), with(&["fs/readFile", "fs/close"]));
        assert_eq!(
            allowed("fs:write"),
            with(&["fs/writeFile", "fs/close", "fs/unheardOf"])
        );
        assert_eq!(
            allowed("exec"),
            with(&[
                "process/list",
                "process/start",
                "process/terminate",
                "command/exec",
                "http/request",
                "unheard/of"
            ])
        );
    }

    #[test]
    fn opening_to_write_is_writing() {
        let reader = Identity {
            name: "test".into(),
            scopes: "fs:read".parse().unwrap(),
        };
        let open = |params| check(&reader, "fs/open", Some(params));
        assert!(open(r#"{"path":"file:///x"}"#).is_ok());
        assert!(open(r#"{"mode":"read"}"#).is_ok());
        let refused = open(r#"{"mode":"replace"}"#).unwrap_err();
        assert!(refused.message.contains("`fs:write`"), "{refused:?}");
    }
}
