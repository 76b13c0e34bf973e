//! Capability catalog: the plugins and skills that are installed in the configuration directory of this
//! machine, with what they say about themselves.
//!
//! [`capability`](crate::capability) searches one directory; here is which directories are searched, and
//! what headers of skills mean.

use std::cmp::Ordering;
use std::path::{Path, PathBuf};

use exec_server_executor::fs::{CancelCheck, FsError};
use exec_server_executor::sandbox::files::{FileIntent, PolicyFiles};
use exec_server_protocol::PathUri;
use exec_server_protocol::capability::{
    CatalogParams, CatalogResult, DiscoveredRoot, InstalledPlugin, MAX_ANSWER_BYTES, MAX_ROOTS,
    ManifestDescription, Plugin, Skill, SkillDependencies, SkillDescription, SkillPolicy,
    SkillRoot, SkillTool, TextFile,
};
use exec_server_protocol::fs::{ReadDirectory, ReadDirectoryParams};
use tokio::sync::oneshot;

use crate::capability::{discover, discover_installed, size};
use crate::yaml::Yaml;
use crate::{ApiError, Engine};

/// Said once for each plugin, and for all other skills, of which something was left out. The text is
/// part of the compatible protocol.
const INCOMPLETE: &str =
    "some capability metadata could not be loaded; discovery may be incomplete";

/// Id of the directory of skills that belong to no plugin.
const SKILLS_ROOT: &str = "codex-home-skills";

/// Longest name of a skill, in characters.
const MAX_NAME: usize = 64;

/// A validated request for the catalog.
#[derive(Debug)]
pub struct CatalogSearch {
    home: PathBuf,
    files: Result<PolicyFiles, FsError>,
}

/// The catalog, and its approximate size.
#[derive(Debug)]
pub struct Catalog {
    /// The result.
    pub result: CatalogResult,
    /// Approximate size of the result in bytes.
    pub bytes: usize,
}

impl Engine {
    /// Prepares to list what is installed in `home`. Accesses no file.
    pub fn catalog(&self, home: PathBuf, params: CatalogParams) -> CatalogSearch {
        CatalogSearch {
            home,
            files: self.executor.files(params.sandbox, FileIntent::Read),
        }
    }
}

impl CatalogSearch {
    /// Lists plugins and skills. `spawn` runs a job that blocks on a thread of its choice; `cancelled`
    /// stops it.
    ///
    /// # Errors
    ///
    /// If the policy cannot be enforced, or the job ends early.
    pub async fn run(
        self,
        spawn: impl Fn(Box<dyn FnOnce() + Send>),
        cancelled: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Catalog, ApiError> {
        let Self { home, files } = self;
        let files = files?;
        let (done, outcome) = oneshot::channel();
        spawn(Box::new(move || {
            let _ = done.send(list(&files, &home, &cancelled));
        }));
        let ended = || ApiError::internal("capability discovery failed");
        outcome.await.map_err(|_| ended())
    }
}

/// Lists what is installed. Blocks.
fn list(files: &PolicyFiles, home: &Path, cancelled: CancelCheck<'_>) -> Catalog {
    let mut catalog = Catalog {
        result: CatalogResult::default(),
        bytes: 0,
    };
    for (id, root) in installed(files, home, cancelled) {
        if cancelled() {
            break;
        }
        catalog.add_plugin(files, id, &root, cancelled);
    }
    let root = home.join("skills");
    if let Ok(path) = PathUri::from_native(&root)
        && exists(files, &path, cancelled)
    {
        let found = discover(files, String::new(), path.clone(), cancelled, &|_| true);
        let mut incomplete = is_incomplete(&found);
        let (skills, broken) = described(&found.skills, |skill| {
            skill.discovery_root = Some(SkillRoot {
                id: SKILLS_ROOT.to_owned(),
                path: path.clone(),
            });
        });
        incomplete |= broken | !catalog.has_room(&found);
        if catalog.has_room(&found) {
            catalog.bytes += size(&found);
            catalog.result.skills = skills;
        }
        catalog.warn_if(incomplete);
    }
    catalog
}

impl Catalog {
    fn add_plugin(
        &mut self,
        files: &PolicyFiles,
        id: String,
        root: &Path,
        cancelled: CancelCheck<'_>,
    ) {
        let Ok(path) = PathUri::from_native(root) else {
            return self.warn_if(true);
        };
        let found = discover_installed(files, path.clone(), cancelled);
        let mut incomplete = is_incomplete(&found);
        let plugin = found.plugin.as_ref().filter(|_| self.has_room(&found));
        let readable = plugin.and_then(|plugin| {
            let manifest = ManifestDescription::parse(&plugin.manifest.contents)?;
            Some((plugin, manifest))
        });
        let Some((plugin, manifest)) = readable else {
            return self.warn_if(true);
        };
        let version = file_name(root);
        let name = manifest.name.unwrap_or_else(|| version.clone());
        let prefix = name.clone();
        let (skills, broken) = described(&found.skills, |skill: &mut SkillDescription| {
            skill.name = format!("{prefix}:{}", skill.name);
        });
        incomplete |= broken;
        self.bytes += size(&found);
        self.result.plugins.push(InstalledPlugin {
            id,
            display_name: manifest.display_name.unwrap_or(name),
            remote_plugin_id: None,
            version,
            root: path,
            files: Plugin {
                mcp_config: match manifest.mcp_servers {
                    Some(contents) => Some(TextFile {
                        path: plugin.manifest.path.clone(),
                        contents,
                    }),
                    None => plugin.mcp_config.clone(),
                },
                ..plugin.clone()
            },
            skills,
        });
        self.warn_if(incomplete);
    }

    fn has_room(&self, found: &DiscoveredRoot) -> bool {
        self.bytes + size(found) <= MAX_ANSWER_BYTES
    }

    fn warn_if(&mut self, incomplete: bool) {
        if incomplete {
            self.result.warnings.push(INCOMPLETE.to_owned());
        }
    }
}

fn is_incomplete(found: &DiscoveredRoot) -> bool {
    found.error.is_some() || !found.warnings.is_empty()
}

/// The installed plugins, `plugins/cache/MARKET/NAME/VERSION`, by id: one version of each.
fn installed(
    files: &PolicyFiles,
    home: &Path,
    cancelled: CancelCheck<'_>,
) -> Vec<(String, PathBuf)> {
    let mut plugins = Vec::new();
    let cache = home.join("plugins/cache");
    for market in directories(files, &cache, cancelled) {
        let market_directory = cache.join(&market);
        for name in directories(files, &market_directory, cancelled) {
            let directory = market_directory.join(&name);
            let versions = directories(files, &directory, cancelled);
            if let Some(version) = versions.into_iter().max_by(|one, other| newer(one, other)) {
                plugins.push((format!("{name}@{market}"), directory.join(version)));
            }
        }
    }
    plugins.sort();
    plugins.truncate(MAX_ROOTS);
    plugins
}

/// Orders versions: a version for development above all, then those of numbers, then other names.
fn newer(one: &str, other: &str) -> Ordering {
    let numbers = |version: &str| -> Option<Vec<u64>> {
        let version = version.split(['-', '+']).next().unwrap_or_default();
        version.split('.').map(|part| part.parse().ok()).collect()
    };
    let key = |version: &str| (version == "local", numbers(version));
    // Without a suffix it is the release, which follows its candidates.
    let is_release = |version: &str| !version.contains('-');
    key(one)
        .cmp(&key(other))
        .then_with(|| is_release(one).cmp(&is_release(other)))
        .then_with(|| one.cmp(other))
}

/// Names of the directories in a directory; none if it cannot be read.
fn directories(files: &PolicyFiles, path: &Path, cancelled: CancelCheck<'_>) -> Vec<String> {
    let Ok(path) = PathUri::from_native(path) else {
        return Vec::new();
    };
    let listed = files.request::<ReadDirectory>(read_directory(path), cancelled);
    let entries = listed.map_or_else(|_| Vec::new(), |listed| listed.entries);
    let named = entries
        .into_iter()
        .filter(|entry| entry.is_directory && entry.path.is_none());
    named.map(|entry| entry.file_name).collect()
}

fn exists(files: &PolicyFiles, path: &PathUri, cancelled: CancelCheck<'_>) -> bool {
    files
        .request::<ReadDirectory>(read_directory(path.clone()), cancelled)
        .is_ok()
}

fn read_directory(path: PathUri) -> ReadDirectoryParams {
    ReadDirectoryParams {
        path,
        links: false,
        metadata: false,
        limit: None,
        after: None,
        sandbox: None,
    }
}

fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Describes skills; the flag is true if some of them have no valid header.
fn described(
    skills: &[Skill],
    complete: impl Fn(&mut SkillDescription),
) -> (Vec<SkillDescription>, bool) {
    let described: Vec<_> = skills
        .iter()
        .filter_map(describe)
        .map(|mut skill| {
            complete(&mut skill);
            skill
        })
        .collect();
    let broken = described.len() < skills.len();
    (described, broken)
}

/// What a skill says about itself; `None` without a valid header.
fn describe(skill: &Skill) -> Option<SkillDescription> {
    let header = header(&skill.instructions.contents)?;
    let text = |value: Option<&Yaml>| {
        let text = value?.text()?;
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        (!text.is_empty()).then_some(text)
    };
    let directory = || {
        let path = skill.instructions.path.to_native().ok()?;
        Some(file_name(path.parent()?))
    };
    let name = text(header.get("name")).or_else(directory)?;
    if name.chars().count() > MAX_NAME {
        return None;
    }
    let metadata = skill.metadata.as_ref();
    // A file that is invalid says nothing.
    let metadata = metadata.and_then(|file| Yaml::parse(&file.contents));
    let metadata = metadata.as_ref();
    Some(SkillDescription {
        name,
        description: text(header.get("description"))?,
        short_description: text(
            header
                .get("metadata")
                .and_then(|metadata| metadata.get("short-description")),
        ),
        path: skill.instructions.path.clone(),
        discovery_root: None,
        dependencies: metadata.and_then(|metadata| dependencies(metadata.get("dependencies")?)),
        policy: metadata.and_then(|metadata| policy(metadata.get("policy")?)),
    })
}

/// The header of instructions: between two lines `---`, the first of which begins the file.
fn header(instructions: &str) -> Option<Yaml> {
    let text = instructions
        .strip_prefix('\u{feff}')
        .unwrap_or(instructions);
    let mut lines = text.lines();
    if lines.next()?.trim_end() != "---" {
        return None;
    }
    let mut header = String::new();
    for line in lines {
        if line.trim_end() == "---" {
            return Yaml::parse(&header);
        }
        header.push_str(line);
        header.push('\n');
    }
    None
}

/// Tools without a type or a value are left out.
fn dependencies(value: &Yaml) -> Option<SkillDependencies> {
    let Yaml::List(tools) = value.get("tools")? else {
        return None;
    };
    let tools: Vec<_> = tools
        .iter()
        .filter_map(|tool| {
            let text = |key| Some(tool.get(key)?.text()?.to_owned());
            Some(SkillTool {
                r#type: text("type")?,
                value: text("value")?,
                description: text("description"),
                transport: text("transport"),
                command: text("command"),
                url: text("url"),
                oauth_callback_port: None,
            })
        })
        .collect();
    (!tools.is_empty()).then_some(SkillDependencies { tools })
}

/// `None` if a member is invalid.
fn policy(value: &Yaml) -> Option<SkillPolicy> {
    /// Products that compatible clients know.
    const PRODUCTS: [&str; 3] = ["atlas", "chatgpt", "codex"];
    if !matches!(value, Yaml::Map(_)) {
        return None;
    }
    let allow_implicit_invocation = match value.get("allow_implicit_invocation") {
        None => None,
        Some(value) if value.is_null() => None,
        Some(value) => Some(value.boolean()?),
    };
    let products = match value.get("products") {
        None => Vec::new(),
        Some(Yaml::List(products)) => products
            .iter()
            .map(|product| {
                let product = product.text()?;
                PRODUCTS.contains(&product).then(|| product.to_owned())
            })
            .collect::<Option<_>>()?,
        Some(_) => return None,
    };
    Some(SkillPolicy {
        allow_implicit_invocation,
        products,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_version_is_chosen() {
        for (versions, newest) in [
            (&["9.0.0", "10.0.0", "2.1"][..], "10.0.0"),
            (&["local", "10.0.0"], "local"),
            (&["abc", "abd"], "abd"),
            (&["1.0.0", "abd"], "1.0.0"),
            (&["1.0.0-rc.1", "1.0.0"], "1.0.0"),
        ] {
            let found = versions.iter().max_by(|one, other| newer(one, other));
            assert_eq!(found, Some(&newest));
        }
    }

    fn skill(instructions: &str, metadata: Option<&str>) -> Skill {
        let file = |path: &str, text: &str| TextFile {
            path: PathUri::parse(path).unwrap(),
            contents: text.to_owned(),
        };
        Skill {
            instructions: file("file:///s/dir/SKILL.md", instructions),
            metadata: metadata.map(|text| file("file:///s/dir/agents/openai.yaml", text)),
        }
    }

    #[test]
    fn skills_without_a_valid_header_are_left_out() {
        let long = format!("---\nname: {}\ndescription: d\n---\n", "x".repeat(65));
        for text in [
            "",
            "no header",
            "---\nname: a\ndescription: b\n",
            "---\nname: a\n---\n",
            "---\nname: [x\n---\n",
            &long,
        ] {
            assert_eq!(describe(&skill(text, None)), None, "{text}");
        }
        let found = describe(&skill("---\ndescription:  a\n  b\n---\n", None)).unwrap();
        assert_eq!(
            (found.name.as_str(), found.description.as_str()),
            ("dir", "a b")
        );
    }

    #[test]
    fn metadata_with_errors_is_ignored() {
        let header = "---\nname: n\ndescription: d\n---\n";
        for (yaml, tools, has_policy) in [
            ("policy: [\n", 0, false),
            ("policy: {}\n", 0, true),
            ("policy:\n  allow_implicit_invocation: \"x\"\n", 0, false),
            ("policy:\n  products: [codex, nonsense]\n", 0, false),
            (
                "dependencies:\n  tools:\n   - type: mcp\n   - type: mcp\n     value: ok\n",
                1,
                false,
            ),
            ("dependencies:\n  tools: []\n", 0, false),
        ] {
            let found = describe(&skill(header, Some(yaml))).unwrap();
            let found_tools = found.dependencies.map_or(0, |needs| needs.tools.len());
            assert_eq!(
                (found_tools, found.policy.is_some()),
                (tools, has_policy),
                "{yaml}"
            );
        }
    }
}
