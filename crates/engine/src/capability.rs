//! Capability discovery: plugins and skills below directories; see
//! [`capability_catalog`](crate::capability_catalog) for those that are installed.
//!
//! Walks the directory and decides what is left out. [`exec_server_protocol::capability`] decides
//! what a manifest means; [`PolicyFiles`] reads the files.

use std::collections::VecDeque;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use exec_server_executor::fs::{CancelCheck, FileOutcome, FsError, Walked};
use exec_server_executor::sandbox::files::{FileIntent, PolicyFiles};
use exec_server_protocol::PathUri;
use exec_server_protocol::capability::{
    APPS_CONFIG, DeclaredLocation, DiscoveredRoot, MANIFESTS, MAX_ANSWER_BYTES, MAX_DEPTH,
    MAX_DIRECTORIES, MAX_ENTRIES, MAX_FILE_BYTES, MAX_ROOT_BYTES, MAX_ROOTS, MCP_CONFIG,
    PARALLEL_ROOTS, Plugin, RootParams, SKILL, SKILL_METADATA, Skill, TextFile, declared,
};
use exec_server_protocol::fs::{
    FsRequest, GetMetadata, GetMetadataParams, ReadFileParams, WalkKind, WalkOptions, WalkParams,
};
use tokio::sync::oneshot;

use crate::{ApiError, Engine};

/// Warnings about one root. A tree of unreadable directories does not need thousands of them.
const MAX_WARNINGS: usize = 100;

/// Check before a file of this size is read; false if there is no memory for its content.
pub type MemoryCheck = Arc<dyn Fn(usize) -> bool + Send + Sync>;

/// A validated request to discover capabilities.
#[derive(Debug, Clone)]
pub struct Discovery {
    roots: Vec<Root>,
}

/// A root, and how its files are accessed or why that is not possible.
#[derive(Debug, Clone)]
struct Root {
    id: String,
    path: PathUri,
    files: Result<PolicyFiles, String>,
}

/// Plugins and skills of all roots of a request.
#[derive(Debug)]
pub struct Discovered {
    /// The results, in the order of the request.
    pub roots: Vec<DiscoveredRoot>,
    /// Approximate size of the results in bytes.
    pub bytes: usize,
}

impl Engine {
    /// Validates a request to discover capabilities. Accesses no file.
    ///
    /// # Errors
    ///
    /// When it has too many roots.
    pub fn discover(&self, roots: Vec<RootParams>) -> Result<Discovery, ApiError> {
        if roots.len() > MAX_ROOTS {
            return Err(ApiError::invalid_request(format!(
                "capability root discovery accepts at most {MAX_ROOTS} roots"
            )));
        }
        let roots = roots
            .into_iter()
            .map(|RootParams { id, path, sandbox }| Root {
                id,
                path,
                files: self
                    .executor
                    .files(sandbox, FileIntent::Read)
                    .map_err(|error| error.to_string()),
            })
            .collect();
        Ok(Discovery { roots })
    }
}

impl Discovery {
    /// Upper bound of the memory that the results need.
    pub const MOST_BYTES: usize = MAX_ANSWER_BYTES + MAX_ROOT_BYTES;

    /// Discovers the capabilities. `spawn` runs a job that blocks on a thread of its choice;
    /// `cancelled` stops running jobs. Returns `None` if `memory` has refused the content of a file.
    pub async fn run(
        self,
        spawn: impl Fn(Box<dyn FnOnce() + Send>),
        cancelled: impl Fn() -> bool + Clone + Send + Sync + 'static,
        memory: MemoryCheck,
    ) -> Option<Discovered> {
        let is_refused = Arc::new(AtomicBool::new(false));
        let refused = Arc::clone(&is_refused);
        let memory: MemoryCheck = Arc::new(move |bytes| {
            let has_room = !refused.load(Ordering::Relaxed) && memory(bytes);
            if !has_room {
                refused.store(true, Ordering::Relaxed);
            }
            has_room
        });
        let mut waiting = self.roots.into_iter();
        let mut running: VecDeque<Running> = VecDeque::new();
        let (mut roots, mut bytes) = (Vec::with_capacity(waiting.len()), 0);
        loop {
            // Completed discoveries that are not counted yet also use memory, so they count as
            // running.
            let room = PARALLEL_ROOTS - running.len();
            let next = waiting.by_ref().take(room);
            running.extend(next.map(|root| root.start(&spawn, cancelled.clone(), &memory)));
            let Some(next) = running.pop_front() else {
                return Some(Discovered { roots, bytes });
            };
            let mut found = next.found().await;
            if is_refused.load(Ordering::Relaxed) {
                // Jobs that are still running end at their next file.
                return None;
            }
            if bytes + size(&found) > MAX_ANSWER_BYTES {
                found = DiscoveredRoot::empty(found.id, found.path);
                found.error = Some(format!(
                    "the response exceeds the limit of {MAX_ANSWER_BYTES} bytes in all files: \
                     request fewer roots at once"
                ));
            }
            bytes += size(&found);
            roots.push(found);
        }
    }
}

/// A running search for the capabilities in one root directory.
struct Running {
    /// The result if the discovery fails.
    failed: DiscoveredRoot,
    outcome: Option<oneshot::Receiver<DiscoveredRoot>>,
}

impl Root {
    /// Starts the discovery.
    fn start(
        self,
        spawn: &impl Fn(Box<dyn FnOnce() + Send>),
        cancelled: impl Fn() -> bool + Send + Sync + 'static,
        memory: &MemoryCheck,
    ) -> Running {
        let Self { id, path, files } = self;
        let mut failed = DiscoveredRoot::empty(id.clone(), path.clone());
        let files = match files {
            Ok(files) => files,
            Err(error) => {
                failed.error = Some(error);
                let outcome = None;
                return Running { failed, outcome };
            }
        };
        failed.error = Some("looking at it failed".to_owned());
        let (done, outcome) = oneshot::channel();
        let memory = Arc::clone(memory);
        spawn(Box::new(move || {
            let found = discover(&files, id, path, &cancelled, &*memory);
            let _ = done.send(found);
        }));
        Running {
            failed,
            outcome: Some(outcome),
        }
    }
}

impl Running {
    async fn found(self) -> DiscoveredRoot {
        match self.outcome {
            Some(outcome) => outcome.await.unwrap_or(self.failed),
            None => self.failed,
        }
    }
}

/// Approximate size of a root in the response.
pub(crate) fn size(root: &DiscoveredRoot) -> usize {
    let files = root
        .namespace_manifests
        .iter()
        .chain(root.plugin.iter().flat_map(|plugin| {
            let configs = plugin.mcp_config.iter().chain(&plugin.apps_config);
            std::iter::once(&plugin.manifest).chain(configs)
        }))
        .chain(
            root.skills
                .iter()
                .flat_map(|skill| std::iter::once(&skill.instructions).chain(&skill.metadata)),
        );
    files.map(|file| file.contents.len() + 256).sum::<usize>() + 256
}

/// Discovers the plugins and skills below a directory. Blocks.
///
/// The `error` of the result says why the whole search failed; its `warnings` say what was left
/// out.
pub(crate) fn discover(
    files: &PolicyFiles,
    id: String,
    path: PathUri,
    cancelled: CancelCheck<'_>,
    memory: &dyn Fn(usize) -> bool,
) -> DiscoveredRoot {
    search(files, id, path, (cancelled, memory), None)
}

/// As [`discover`], for an installed plugin: its apps are in a file of their own by default.
pub(crate) fn discover_installed(
    files: &PolicyFiles,
    path: PathUri,
    cancelled: CancelCheck<'_>,
) -> DiscoveredRoot {
    // The caller bounds the number of plugins.
    let memory: &dyn Fn(usize) -> bool = &|_| true;
    let apps = Some(APPS_CONFIG);
    search(files, String::new(), path, (cancelled, memory), apps)
}

fn search(
    files: &PolicyFiles,
    id: String,
    path: PathUri,
    (cancelled, memory): (CancelCheck<'_>, &dyn Fn(usize) -> bool),
    default_apps: Option<&'static str>,
) -> DiscoveredRoot {
    let mut found = DiscoveredRoot::empty(id, path);
    let outcome = match found.path.to_native() {
        Ok(root) => CapabilitySearch {
            files,
            root,
            cancelled,
            memory,
            default_apps,
            left: MAX_ROOT_BYTES,
            unsaid: 0,
            found: &mut found,
        }
        .run(),
        Err(error) => Err(format!(
            "failed to inspect capability root {}: {error}",
            found.path
        )),
    };
    if let Err(error) = outcome {
        found = DiscoveredRoot {
            error: Some(error),
            ..DiscoveredRoot::empty(found.id, found.path)
        };
    }
    found
}

struct CapabilitySearch<'a> {
    files: &'a PolicyFiles,
    root: PathBuf,
    cancelled: CancelCheck<'a>,
    /// Called before a file is read.
    memory: &'a dyn Fn(usize) -> bool,
    /// File of a plugin's apps if its manifest names none.
    default_apps: Option<&'static str>,
    /// Bytes that may still be read.
    left: usize,
    /// Warnings that were dropped because of [`MAX_WARNINGS`].
    unsaid: usize,
    found: &'a mut DiscoveredRoot,
}

impl CapabilitySearch<'_> {
    fn run(mut self) -> Result<(), String> {
        let uri = self.found.path.clone();
        self.inspect(&uri)?;
        let walked = self.walk(&uri)?;
        let (skills, plugins) = self.candidates(&walked);
        self.plugin()?;
        self.read_candidates(skills, plugins)?;
        if self.unsaid > 0 {
            let more = format!("and {} more warnings", self.unsaid);
            self.found.warnings.push(more);
        }
        Ok(())
    }

    /// Fails if the root is not a directory.
    fn inspect(&self, uri: &PathUri) -> Result<(), String> {
        let metadata_params = GetMetadataParams {
            path: uri.clone(),
            follow_symlinks: true,
            sandbox: None,
        };
        let inspected = self
            .files
            .request::<GetMetadata>(metadata_params, self.cancelled);
        let metadata = inspected.map_err(|error| {
            format!(
                "failed to inspect capability root {uri}: {}",
                error_text(&error)
            )
        })?;
        if !metadata.is_directory {
            return Err(format!("capability root {uri} is not a directory"));
        }
        Ok(())
    }

    fn walk(&mut self, uri: &PathUri) -> Result<Walked, String> {
        let options = WalkOptions {
            max_depth: MAX_DEPTH,
            max_directories: MAX_DIRECTORIES,
            max_entries: MAX_ENTRIES,
            follow_directory_symlinks: true,
            prune_hidden_directories: false,
        };
        let walk = FsRequest::Walk(WalkParams {
            path: uri.clone(),
            options,
            limit: None,
            after: None,
            sandbox: None,
        });
        let walked = match self.files.call(walk, self.cancelled) {
            Ok(FileOutcome::Walked(walked)) => walked,
            Ok(_) => Walked::default(),
            Err(error) => {
                let error = error_text(&error);
                return Err(format!("failed to scan capability root {uri}: {error}"));
            }
        };
        for (path, error) in &walked.errors {
            self.warn(format!(
                "failed to scan capability path {}: {error}",
                shown(path)
            ));
        }
        if walked.truncated {
            self.warn(format!(
                "capability scan reached its traversal limit (root: {uri})"
            ));
        }
        Ok(walked)
    }

    /// The files with instructions of skills; and the directory of each plugin below the root, with
    /// the priority of its manifest.
    fn candidates(&self, walked: &Walked) -> (Vec<PathBuf>, Vec<(PathBuf, usize)>) {
        let mut skills = Vec::new();
        let mut plugins: Vec<(PathBuf, usize)> = Vec::new();
        for (directory, entries) in walked.directories() {
            for (name, kind) in entries {
                if kind != WalkKind::File {
                    continue;
                }
                if name == SKILL {
                    skills.push(directory.join(name));
                } else if let Some((home, rank)) = manifest_of(directory, name)
                    && home != self.root
                {
                    match plugins.iter_mut().find(|(other, _)| other == home) {
                        Some((_, best)) => *best = rank.min(*best),
                        None => plugins.push((home.to_owned(), rank)),
                    }
                }
            }
        }
        (skills, plugins)
    }

    fn read_candidates(
        &mut self,
        skills: Vec<PathBuf>,
        plugins: Vec<(PathBuf, usize)>,
    ) -> Result<(), String> {
        let mut nested: Vec<(PathUri, PathBuf)> = plugins
            .into_iter()
            .filter_map(|(home, rank)| {
                let path = home.join(MANIFESTS[rank]);
                Some((PathUri::from_native(&path).ok()?, path))
            })
            .collect();
        nested.sort_by(|(one, _), (other, _)| one.as_str().cmp(other.as_str()));
        for (_, path) in nested {
            if let Some(manifest) = self.read(&path)? {
                self.found.namespace_manifests.push(manifest);
            }
        }
        let mut skills: Vec<(PathUri, PathBuf)> = skills
            .into_iter()
            .filter_map(|path| Some((PathUri::from_native(&path).ok()?, path)))
            .collect();
        skills.sort_by(|(one, _), (other, _)| one.as_str().cmp(other.as_str()));
        for (_, path) in skills {
            let Some(instructions) = self.read(&path)? else {
                continue;
            };
            let metadata = path.with_file_name(SKILL_METADATA);
            let metadata = self.read(&metadata)?;
            self.found.skills.push(Skill {
                instructions,
                metadata,
            });
        }
        Ok(())
    }

    /// Reads the manifest of the plugin at the root, or of the plugin that contains the root.
    fn plugin(&mut self) -> Result<(), String> {
        let root = self.root.clone();
        if let Some(manifest) = self.manifest(&root)? {
            let (mcp, apps) = declared(&manifest.contents);
            let mcp_config = match self.declared_location(&manifest, "mcpServers", mcp) {
                Some(DeclaredLocation::File(path)) => self.read(&root.join(path))?,
                Some(DeclaredLocation::Inline) => None,
                _ => self.read(&root.join(MCP_CONFIG))?,
            };
            let apps_config = match self.declared_location(&manifest, "apps", apps) {
                Some(DeclaredLocation::File(path)) => self.read(&root.join(path))?,
                Some(DeclaredLocation::Absent) => match self.default_apps {
                    Some(path) => self.read(&root.join(path))?,
                    None => None,
                },
                _ => None,
            };
            self.found.namespace_manifests.push(manifest.clone());
            self.found.plugin = Some(Plugin {
                manifest,
                mcp_config,
                apps_config,
            });
            return Ok(());
        }
        for above in root.ancestors().skip(1) {
            if let Some(manifest) = self.manifest(above)? {
                self.found.namespace_manifests.push(manifest);
                break;
            }
        }
        Ok(())
    }

    /// The location that a manifest declares, if it is valid; otherwise adds a warning.
    fn declared_location(
        &mut self,
        manifest: &TextFile,
        key: &str,
        declared: DeclaredLocation,
    ) -> Option<DeclaredLocation> {
        match declared {
            DeclaredLocation::Invalid(reason) => {
                self.warn(format!("ignoring {key} in {}: {reason}", manifest.path));
                None
            }
            declared => Some(declared),
        }
    }

    /// The manifest of a directory, if the directory is a plugin.
    fn manifest(&mut self, directory: &Path) -> Result<Option<TextFile>, String> {
        for name in MANIFESTS {
            if let Some(manifest) = self.read(&directory.join(name))? {
                return Ok(Some(manifest));
            }
        }
        Ok(None)
    }

    /// Reads a text file; `None` if it does not exist or cannot be reported.
    fn read(&mut self, path: &Path) -> Result<Option<TextFile>, String> {
        if (self.cancelled)() {
            return Err("the request was cancelled".to_owned());
        }
        let Ok(uri) = PathUri::from_native(path) else {
            return Ok(None);
        };
        let read = FsRequest::ReadFile(ReadFileParams {
            path: uri.clone(),
            follow_symlinks: true,
            sandbox: None,
        });
        let file = match self.files.call(read, self.cancelled) {
            Ok(FileOutcome::File { file, .. }) => file,
            Ok(_) => return Ok(None),
            Err(error) => {
                if !is_absent(&error) {
                    let error = error_text(&error);
                    self.warn(format!("failed to read capability file {uri}: {error}"));
                }
                return Ok(None);
            }
        };
        // Memory is taken before the file is read: many roots are searched at the same time.
        let size = file.metadata().map_or(u64::MAX, |found| found.len());
        let size = usize::try_from(size).map_or(MAX_FILE_BYTES, |size| size.min(MAX_FILE_BYTES));
        if !(self.memory)(size + 256) {
            return Err("no memory for its files".to_owned());
        }
        // The file may grow while it is read, so the read is bounded.
        let mut bytes = Vec::with_capacity(size + 1);
        if let Err(error) = file.take(MAX_FILE_BYTES as u64 + 1).read_to_end(&mut bytes) {
            self.warn(format!("failed to read capability file {uri}: {error}"));
            return Ok(None);
        }
        if bytes.len() > MAX_FILE_BYTES {
            self.warn(format!(
                "capability file {uri} exceeds the {MAX_FILE_BYTES}-byte limit"
            ));
            return Ok(None);
        }
        if bytes.len() > self.left {
            self.warn(format!(
                "capability root bundle exceeds the {MAX_ROOT_BYTES}-byte limit: {uri} is left out"
            ));
            return Ok(None);
        }
        bytes.shrink_to_fit();
        let contents = match String::from_utf8(bytes) {
            Ok(contents) => contents,
            Err(error) => {
                let error = error.utf8_error();
                self.warn(format!("capability file {uri} is not UTF-8: {error}"));
                return Ok(None);
            }
        };
        self.left -= contents.len();
        Ok(Some(TextFile {
            path: uri,
            contents,
        }))
    }

    fn warn(&mut self, warning: String) {
        match self.found.warnings.len() < MAX_WARNINGS {
            true => self.found.warnings.push(warning),
            false => self.unsaid += 1,
        }
    }
}

/// The plugin directory of a manifest file, and the priority of that kind of manifest.
fn manifest_of<'a>(directory: &'a Path, name: &std::ffi::OsStr) -> Option<(&'a Path, usize)> {
    let marker = directory.file_name()?;
    let rank = MANIFESTS.iter().position(|manifest| {
        let path = Path::new(manifest);
        path.file_name() == Some(name) && path.parent().is_some_and(|parent| parent == marker)
    })?;
    Some((directory.parent()?, rank))
}

/// Whether the error means that the file does not exist, which is not a failure here.
fn is_absent(error: &FsError) -> bool {
    match error {
        FsError::Io { source, .. } => matches!(
            source.kind(),
            std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
        ),
        FsError::NotAFile(_) => true,
        _ => false,
    }
}

/// The error text without the path, because the caller reports the path itself.
fn error_text(error: &FsError) -> String {
    match error {
        FsError::Io { source, .. } => source.to_string(),
        other => other.to_string(),
    }
}

fn shown(path: &Path) -> String {
    match PathUri::from_native(path) {
        Ok(uri) => uri.to_string(),
        Err(_) => path.display().to_string(),
    }
}
