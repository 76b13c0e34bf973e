//! `capabilityRoots/*`: what plugins and skills a directory holds.
//!
//! Owns the types, the limits and the rules about names and manifests. Looks at no file.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::method::method_types;
use crate::params;
use crate::path::PathUri;
use crate::sandbox::Sandbox;
use crate::table::EVERYWHERE;

method_types! {
    /// `capabilityRoots/discoverV1`: the texts of plugins and skills below some directories.
    DiscoverV1;
}

/// The capability of servers that obey the policies of roots.
pub const SANDBOX_CAPABILITY: &str = "capabilityDiscoverySandbox";

/// Roots in one request.
pub const MAX_ROOTS: usize = 128;
/// Roots that are looked at at the same time.
pub const PARALLEL_ROOTS: usize = 8;
/// Directories between a root and what is found.
pub const MAX_DEPTH: usize = 6;
/// Directories to enter below one root.
pub const MAX_DIRECTORIES: usize = 2000;
/// Entries to look at below one root.
pub const MAX_ENTRIES: usize = 20_000;
/// Bytes in one file.
pub const MAX_FILE_BYTES: usize = 1 << 20;
/// Bytes in all files of one root.
pub const MAX_ROOT_BYTES: usize = 16 << 20;
/// Bytes in all files of one answer, those that are told twice counted twice, so that it stays one
/// message: escapes make it longer.
pub const MAX_ANSWER_BYTES: usize = 50 << 20;

/// Where a plugin's manifest is, below its directory; the first that is there counts.
pub const MANIFESTS: [&str; 3] = [
    ".codex-plugin/plugin.json",
    ".claude-plugin/plugin.json",
    ".cursor-plugin/plugin.json",
];
/// The file that a skill is.
pub const SKILL: &str = "SKILL.md";
/// What may be beside it.
pub const SKILL_METADATA: &str = "agents/openai.yaml";
/// Where a plugin's MCP servers are unless it says otherwise.
pub const MCP_CONFIG: &str = ".mcp.json";

/// Parameters of [`DiscoverV1`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DiscoverParams {
    /// Where to look, at most [`MAX_ROOTS`].
    #[serde(deserialize_with = "roots")]
    pub roots: Vec<RootParams>,
}

/// Each with its policy, which must not be lost.
fn roots<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<RootParams>, D::Error> {
    struct Root(RootParams);

    impl<'de> Deserialize<'de> for Root {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            params::object(deserializer, EVERYWHERE).map(Self)
        }
    }

    let roots = Vec::<Root>::deserialize(deserializer)?;
    Ok(roots.into_iter().map(|root| root.0).collect())
}

/// One directory to look at.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RootParams {
    /// What the client calls it.
    pub id: String,
    /// The directory.
    pub path: PathUri,
    /// The policy to look under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Result of [`DiscoverV1`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiscoverResult {
    /// As many as were asked for, in the same order.
    pub roots: Vec<DiscoveredRoot>,
}

/// What was found below one directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DiscoveredRoot {
    /// As asked for.
    pub id: String,
    /// As asked for.
    pub path: PathUri,
    /// The plugin that the directory is.
    #[serde(default)]
    pub plugin: Option<Plugin>,
    /// All skills, by path.
    #[serde(default)]
    pub skills: Vec<Skill>,
    /// The manifest of the plugin that the directory is or is in, then those below it.
    #[serde(default)]
    pub namespace_manifests: Vec<TextFile>,
    /// What was left out and why.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Why nothing was found at all.
    #[serde(default)]
    pub error: Option<String>,
}

impl DiscoveredRoot {
    /// Nothing was found yet.
    pub fn empty(id: String, path: PathUri) -> Self {
        Self {
            id,
            path,
            plugin: None,
            skills: Vec::new(),
            namespace_manifests: Vec::new(),
            warnings: Vec::new(),
            error: None,
        }
    }
}

/// The files that make a plugin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Plugin {
    /// Its manifest.
    pub manifest: TextFile,
    /// Its MCP servers, if they are in a file of their own.
    #[serde(default)]
    pub mcp_config: Option<TextFile>,
    /// Its apps, likewise.
    #[serde(default)]
    pub apps_config: Option<TextFile>,
}

/// The files that make a skill.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skill {
    /// The skill itself.
    pub instructions: TextFile,
    /// What is said about it.
    #[serde(default)]
    pub metadata: Option<TextFile>,
}

/// A file and the text in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextFile {
    /// Where it is.
    pub path: PathUri,
    /// What is in it.
    pub contents: String,
}

/// Where a manifest says that a part of the plugin is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Declared {
    /// Nothing is said about it.
    Nowhere,
    /// In the manifest itself.
    Inline,
    /// In this file, relative to the plugin's directory.
    File(String),
    /// Somewhere that cannot be.
    Refused(&'static str),
}

/// Where a manifest says that MCP servers and apps are; one that is no JSON says nothing.
pub fn declared(manifest: &str) -> (Declared, Declared) {
    /// Everything else is skipped.
    #[derive(Default, Deserialize)]
    struct Manifest {
        #[serde(default, rename = "mcpServers")]
        mcp_servers: Value,
        #[serde(default)]
        apps: Value,
    }
    let manifest: Manifest = serde_json::from_str(manifest).unwrap_or_default();
    (place(manifest.mcp_servers), place(manifest.apps))
}

fn place(said: Value) -> Declared {
    let path = match said {
        Value::Object(_) => return Declared::Inline,
        Value::String(path) => path,
        _ => return Declared::Nowhere,
    };
    let Some(inside) = path.strip_prefix("./") else {
        return Declared::Refused("path must start with `./`");
    };
    let mut parts = inside.split(['/', '\\']);
    if parts.any(|part| part == "..") {
        return Declared::Refused("path must not contain `..`");
    }
    if inside.starts_with('/') || inside.contains('\0') || inside.trim_matches('/').is_empty() {
        return Declared::Refused("path must stay below the plugin's directory");
    }
    Declared::File(inside.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests_say_where_things_are() {
        let file = |path: &str| Declared::File(path.to_owned());
        for (mcp, says) in [
            (r#""./m.json""#, file("m.json")),
            (r#""./a/b.json""#, file("a/b.json")),
            (r#"{"x":1}"#, Declared::Inline),
            ("null", Declared::Nowhere),
            ("5", Declared::Nowhere),
            (r#"["./x"]"#, Declared::Nowhere),
        ] {
            let manifest = format!(r#"{{"name":"p","mcpServers":{mcp},"apps":{mcp}}}"#);
            assert_eq!(declared(&manifest), (says.clone(), says), "{mcp}");
        }
        for bad in [
            "",
            "m.json",
            "/etc/x",
            "../x",
            "./../x",
            "./a/../../x",
            "./a\\..\\x",
            ".//etc",
            "./",
            "./a\0b",
        ] {
            let manifest = serde_json::json!({ "mcpServers": bad }).to_string();
            let (mcp, apps) = declared(&manifest);
            assert!(matches!(mcp, Declared::Refused(_)), "{bad}");
            assert_eq!(apps, Declared::Nowhere);
        }
        for malformed in ["", "{", "[]", "5", r#"{"mcpServers":1,"mcpServers":2}"#] {
            assert_eq!(declared(malformed), (Declared::Nowhere, Declared::Nowhere));
        }
        assert_eq!(declared(&"[".repeat(100_000)).0, Declared::Nowhere);
    }

    #[test]
    fn what_is_absent_is_null() {
        let path = PathUri::parse("file:///p").unwrap();
        let text = serde_json::to_string(&DiscoveredRoot::empty("x".to_owned(), path)).unwrap();
        assert_eq!(
            text,
            r#"{"id":"x","path":"file:///p","plugin":null,"skills":[],"namespaceManifests":[],"warnings":[],"error":null}"#
        );
        let least = r#"{"id":"x","path":"file:///p"}"#;
        let least: DiscoveredRoot = serde_json::from_str(least).unwrap();
        assert_eq!(serde_json::to_string(&least).unwrap(), text);
    }
}
