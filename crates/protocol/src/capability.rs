//! `capabilityRoots/*` and `capabilities/*`: discovery of plugins and skills, in directories that the
//! client names or in the configuration directory of this machine.
//!
//! Contains the types, the limits, and the rules about names and manifests. Files are read in
//! `executor`.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::method::method_types;
use crate::params;
use crate::path::PathUri;
use crate::sandbox::Sandbox;
use crate::table::EVERYWHERE;

method_types! {
    /// `capabilityRoots/discoverV1`: contents of the plugins and skills below some directories.
    DiscoverV1;

    /// `capabilities/discoverV2`: the plugins and skills that are installed on this machine.
    DiscoverV2;
}

/// Capability of servers that apply the sandbox policy of each root.
pub const SANDBOX_CAPABILITY: &str = "capabilityDiscoverySandbox";

/// Maximum number of roots in one request.
pub const MAX_ROOTS: usize = 128;
/// Number of roots that are searched concurrently.
pub const PARALLEL_ROOTS: usize = 8;
/// Maximum number of directories between a root and a file that is found.
pub const MAX_DEPTH: usize = 6;
/// Maximum number of directories that are searched below one root.
pub const MAX_DIRECTORIES: usize = 2000;
/// Maximum number of entries that are examined below one root.
pub const MAX_ENTRIES: usize = 20_000;
/// Maximum size of one file in bytes.
pub const MAX_FILE_BYTES: usize = 1 << 20;
/// Maximum size of all files of one root in bytes.
pub const MAX_ROOT_BYTES: usize = 16 << 20;
/// Maximum size of all files of one response in bytes; a file that is listed twice counts twice.
/// Leaves room for JSON escapes within the limit of a message.
pub const MAX_ANSWER_BYTES: usize = 50 << 20;

/// Possible locations of a plugin's manifest, below its directory; the first that exists is used.
pub const MANIFESTS: [&str; 3] = [
    ".codex-plugin/plugin.json",
    ".claude-plugin/plugin.json",
    ".cursor-plugin/plugin.json",
];
/// File that defines a skill.
pub const SKILL: &str = "SKILL.md";
/// Optional metadata file in a skill's directory.
pub const SKILL_METADATA: &str = "agents/openai.yaml";
/// Default file of a plugin's MCP servers.
pub const MCP_CONFIG: &str = ".mcp.json";
/// Default file of a plugin's apps.
pub const APPS_CONFIG: &str = ".app.json";

/// Parameters of [`DiscoverV1`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DiscoverParams {
    /// Directories to search, at most [`MAX_ROOTS`].
    #[serde(deserialize_with = "roots")]
    pub roots: Vec<RootParams>,
}

/// Each root has a policy, which must not be lost.
fn roots<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<RootParams>, D::Error> {
    struct CapabilityRoot(RootParams);

    impl<'de> Deserialize<'de> for CapabilityRoot {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            params::object(deserializer, EVERYWHERE).map(Self)
        }
    }

    let roots = Vec::<CapabilityRoot>::deserialize(deserializer)?;
    Ok(roots.into_iter().map(|root| root.0).collect())
}

/// One directory to search.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RootParams {
    /// The client's id of the root.
    pub id: String,
    /// The directory.
    pub path: PathUri,
    /// Sandbox policy of the search.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Result of [`DiscoverV1`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiscoverResult {
    /// One result for each requested root, in the same order.
    pub roots: Vec<DiscoveredRoot>,
}

/// Result for one root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DiscoveredRoot {
    /// Same value as in the request.
    pub id: String,
    /// Same value as in the request.
    pub path: PathUri,
    /// The plugin, if the directory is one.
    #[serde(default)]
    pub plugin: Option<Plugin>,
    /// Skills, ordered by path.
    #[serde(default)]
    pub skills: Vec<Skill>,
    /// The manifest of the plugin that is or contains the directory, then those below it.
    #[serde(default)]
    pub namespace_manifests: Vec<TextFile>,
    /// Messages about omitted files.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Error message if the search failed.
    #[serde(default)]
    pub error: Option<String>,
}

impl DiscoveredRoot {
    /// Creates an empty result.
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

/// Files of a plugin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Plugin {
    /// The manifest.
    pub manifest: TextFile,
    /// The file with its MCP servers, if it is not the manifest.
    #[serde(default)]
    pub mcp_config: Option<TextFile>,
    /// The file with its apps, if it is not the manifest.
    #[serde(default)]
    pub apps_config: Option<TextFile>,
}

/// Files of a skill.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skill {
    /// The instructions.
    pub instructions: TextFile,
    /// The metadata.
    #[serde(default)]
    pub metadata: Option<TextFile>,
}

/// A text file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextFile {
    /// The path.
    pub path: PathUri,
    /// The contents.
    pub contents: String,
}

/// Parameters of [`DiscoverV2`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CatalogParams {
    /// Directory in which the client works; has no effect on the result.
    pub cwd: PathUri,
    /// Sandbox policy of the search.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Result of [`DiscoverV2`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CatalogResult {
    /// Installed plugins, ordered by id.
    pub plugins: Vec<InstalledPlugin>,
    /// Skills that belong to no plugin, ordered by path.
    pub skills: Vec<SkillDescription>,
    /// Messages about omitted plugins and skills.
    pub warnings: Vec<String>,
}

/// An installed plugin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InstalledPlugin {
    /// `NAME@MARKET`.
    pub id: String,
    /// Name for people.
    pub display_name: String,
    /// Always absent: plugins are installed from directories.
    pub remote_plugin_id: Option<String>,
    /// Name of the directory with this version.
    pub version: String,
    /// The directory.
    pub root: PathUri,
    /// Its files.
    pub files: Plugin,
    /// Its skills, ordered by path.
    pub skills: Vec<SkillDescription>,
}

/// What a skill says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SkillDescription {
    /// Its name; that of a plugin's skill begins with the plugin's name and a colon.
    pub name: String,
    /// When to use it.
    pub description: String,
    /// The same in fewer words.
    pub short_description: Option<String>,
    /// Its instructions.
    pub path: PathUri,
    /// The directory in which it was searched; skills of plugins have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub discovery_root: Option<SkillRoot>,
    /// What it needs.
    pub dependencies: Option<SkillDependencies>,
    /// When it may be used.
    pub policy: Option<SkillPolicy>,
}

/// A directory that contains skills.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkillRoot {
    /// What it is.
    pub id: String,
    /// The directory.
    pub path: PathUri,
}

/// What a skill needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkillDependencies {
    /// Tools, in the order of the file.
    pub tools: Vec<SkillTool>,
}

/// A tool that a skill needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SkillTool {
    /// Kind of the tool, such as `mcp`.
    pub r#type: String,
    /// Name of the tool.
    pub value: String,
    /// What it is for.
    pub description: Option<String>,
    /// How it is reached.
    pub transport: Option<String>,
    /// Command that starts the tool.
    pub command: Option<String>,
    /// Its address.
    pub url: Option<String>,
    /// Port for the login; never declared by files that compatible clients read.
    pub oauth_callback_port: Option<u16>,
}

/// When a skill may be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SkillPolicy {
    /// Whether the model may use it unasked.
    pub allow_implicit_invocation: Option<bool>,
    /// Products that may use it; all if empty.
    pub products: Vec<String>,
}

/// Location of a part of a plugin, as its manifest declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeclaredLocation {
    /// The manifest declares none.
    Absent,
    /// In the manifest itself.
    Inline,
    /// In this file, relative to the plugin's directory.
    File(String),
    /// An invalid location, with the reason.
    Invalid(&'static str),
}

/// Returns the declared locations of MCP servers and apps; a manifest that is not JSON declares
/// none.
pub fn declared(manifest: &str) -> (DeclaredLocation, DeclaredLocation) {
    /// Other fields are ignored.
    #[derive(Default, Deserialize)]
    struct Manifest {
        #[serde(default, rename = "mcpServers")]
        mcp_servers: Value,
        #[serde(default)]
        apps: Value,
    }
    let manifest: Manifest = serde_json::from_str(manifest).unwrap_or_default();
    (
        parse_location(manifest.mcp_servers),
        parse_location(manifest.apps),
    )
}

/// What a manifest says about its plugin, besides the [locations](declared) of its parts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ManifestDescription {
    /// Name of the plugin, if it is not empty.
    pub name: Option<String>,
    /// Name for people, if it is not empty.
    pub display_name: Option<String>,
    /// MCP servers that the manifest contains itself, as JSON.
    pub mcp_servers: Option<String>,
}

impl ManifestDescription {
    /// Reads a manifest; `None` if it is no JSON object.
    pub fn parse(manifest: &str) -> Option<Self> {
        let manifest: Value = serde_json::from_str(manifest).ok()?;
        let given = |text: &Value| {
            let text = text.as_str()?.trim();
            (!text.is_empty()).then(|| text.to_owned())
        };
        manifest.is_object().then(|| Self {
            name: given(&manifest["name"]),
            display_name: given(&manifest["interface"]["displayName"]),
            mcp_servers: (manifest["mcpServers"].is_object())
                .then(|| manifest["mcpServers"].to_string()),
        })
    }
}

fn parse_location(value: Value) -> DeclaredLocation {
    let path = match value {
        Value::Object(_) => return DeclaredLocation::Inline,
        Value::String(path) => path,
        _ => return DeclaredLocation::Absent,
    };
    let Some(inside) = path.strip_prefix("./") else {
        return DeclaredLocation::Invalid("path must start with `./`");
    };
    let mut parts = inside.split(['/', '\\']);
    if parts.any(|part| part == "..") {
        return DeclaredLocation::Invalid("path must not contain `..`");
    }
    if inside.starts_with('/') || inside.contains('\0') || inside.trim_matches('/').is_empty() {
        return DeclaredLocation::Invalid("path must stay below the plugin's directory");
    }
    DeclaredLocation::File(inside.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugin_manifest_declares_its_locations() {
        let file = |path: &str| DeclaredLocation::File(path.to_owned());
        for (mcp, says) in [
            (r#""./m.json""#, file("m.json")),
            (r#""./a/b.json""#, file("a/b.json")),
            (r#"{"x":1}"#, DeclaredLocation::Inline),
            ("null", DeclaredLocation::Absent),
            ("5", DeclaredLocation::Absent),
            (r#"["./x"]"#, DeclaredLocation::Absent),
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
            assert!(matches!(mcp, DeclaredLocation::Invalid(_)), "{bad}");
            assert_eq!(apps, DeclaredLocation::Absent);
        }
        for malformed in ["", "{", "[]", "5", r#"{"mcpServers":1,"mcpServers":2}"#] {
            assert_eq!(
                declared(malformed),
                (DeclaredLocation::Absent, DeclaredLocation::Absent)
            );
        }
        assert_eq!(declared(&"[".repeat(100_000)).0, DeclaredLocation::Absent);
    }

    #[test]
    fn absent_members_are_null_in_results() {
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
