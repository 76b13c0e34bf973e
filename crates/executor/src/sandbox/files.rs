//! File operations under a policy, run in this process or in a confined helper.
//!
//! The operations are the same in both cases and are implemented in [`crate::fs`].

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use exec_server_protocol::chunk::ByteChunk;
use exec_server_protocol::fs::{
    Canonicalize, CanonicalizeParams, FsMethod, FsRequest, FsResponse, OpenMode,
};
use exec_server_protocol::sandbox::{
    EntryPath, FilePermissions, NetworkPermission, PathAccess, Permissions, Sandbox, SpecialPath,
};
use exec_server_sandbox::policy::{self, CachedDisk, Disk, PolicyDirectories, RealDisk};

use super::helper::{HelperFrame, HelperRequest, HelperResponse};
use super::pool::{CachedResolution, HelperKey, PendingHelperRequest};
use crate::executor::Executor;
use crate::fs::wire::text;
use crate::fs::{
    self, CancelCheck, ConfinedRename, FileOutcome, FsError, OpenFile, ReplacementDescription,
    TransferredFile,
};

/// Access that a file operation needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileIntent {
    /// The operation only reads.
    Read,
    /// The operation changes files.
    Write,
}

impl FileIntent {
    /// Returns the access that a request needs.
    pub fn of(request: &FsRequest) -> Self {
        if request.writes() {
            Self::Write
        } else {
            Self::Read
        }
    }
}

/// File operations of one policy, run directly or in a confined helper. Cheap to clone.
#[derive(Debug, Clone)]
pub struct PolicyFiles(Option<ConfinedFiles>);

/// File operations that must run in a confined helper.
#[derive(Debug, Clone)]
pub(crate) struct ConfinedFiles {
    executor: Executor,
    sandbox: Arc<Sandbox>,
    intent: FileIntent,
}

/// Returns whether a policy restricts files.
///
/// Operations under such a policy never run in this process, even if the policy allows reading every
/// path: what a path leads to depends on the process that opens it. `/proc/self` is the memory and
/// the environment of that process.
fn restricts_files(sandbox: &Sandbox) -> bool {
    matches!(
        sandbox.permissions,
        Permissions::Managed {
            file_system: FilePermissions::Restricted { .. },
            ..
        }
    )
}

/// Returns whether a policy allows reading every path.
fn reads_everything(sandbox: &Sandbox) -> bool {
    let Permissions::Managed {
        file_system: FilePermissions::Restricted { entries, .. },
        ..
    } = &sandbox.permissions
    else {
        return true;
    };
    let is_root = |path: &EntryPath| {
        matches!(
            path,
            EntryPath::Special {
                value: SpecialPath::Root
            }
        )
    };
    entries
        .iter()
        .any(|entry| is_root(&entry.path) && entry.access != PathAccess::Deny)
        && entries.iter().all(|entry| entry.access != PathAccess::Deny)
}

/// Returns whether the meaning of a policy depends on the working directory of the caller.
fn depends_on_directory(sandbox: &Sandbox) -> bool {
    let Permissions::Managed {
        file_system: FilePermissions::Restricted { entries, .. },
        ..
    } = &sandbox.permissions
    else {
        return false;
    };
    entries.iter().any(|entry| match &entry.path {
        EntryPath::Special { value } => matches!(value, SpecialPath::ProjectRoots { .. }),
        EntryPath::GlobPattern { pattern } => !pattern.starts_with('/'),
        EntryPath::Path { .. } => false,
    })
}

impl PolicyFiles {
    /// Selects where operations under this policy run. Does not access the disk.
    pub(crate) fn new(
        executor: &Executor,
        sandbox: Option<Sandbox>,
        intent: FileIntent,
    ) -> Result<Self, FsError> {
        let stated = sandbox.as_ref().and_then(|sandbox| sandbox.cwd.as_ref());
        if let Some(Err(error)) = stated.map(|cwd| cwd.to_native()) {
            return Err(FsError::Params(format!("invalid sandbox cwd: {error}")));
        }
        let Some(sandbox) = sandbox.filter(restricts_files) else {
            return Ok(Self(None));
        };
        let context = sandbox.policy_context.as_ref();
        let cwd = context.and_then(|context| context.cwd.as_ref());
        if depends_on_directory(&sandbox) && cwd.or(sandbox.cwd.as_ref()).is_none() {
            return Err(FsError::Params(
                "file system sandbox context with dynamic permissions requires cwd".to_owned(),
            ));
        }
        Ok(Self(Some(ConfinedFiles {
            executor: executor.clone(),
            sandbox: Arc::new(sandbox),
            intent,
        })))
    }

    /// Returns whether operations run in this process.
    pub fn is_direct(&self) -> bool {
        self.0.is_none()
    }

    /// Runs a request. May block.
    ///
    /// # Errors
    ///
    /// The error of the system, or the reason why the policy cannot be enforced.
    pub fn call(
        &self,
        request: FsRequest,
        cancelled: CancelCheck<'_>,
    ) -> Result<FileOutcome, FsError> {
        self.call_within(request, usize::MAX, cancelled)
    }

    /// As [`PolicyFiles::call`]. In this process, a listing that needs more than `memory` bytes
    /// fails with [`FsError::ListingMemory`]; in a helper it uses the memory of the helper, and
    /// their number is bounded.
    ///
    /// # Errors
    ///
    /// As [`PolicyFiles::call`].
    pub fn call_within(
        &self,
        request: FsRequest,
        memory: usize,
        cancelled: CancelCheck<'_>,
    ) -> Result<FileOutcome, FsError> {
        let Some(HelperWork { confined, key }) = self.work()? else {
            let learnt = match &request {
                FsRequest::ReadFile(params) if self.is_direct() => params.path.to_native().ok(),
                FsRequest::GetMetadata(params) if self.is_direct() => params.path.to_native().ok(),
                _ => None,
            };
            let answer = fs::perform_within(request, memory, cancelled);
            if let Some(path) = learnt {
                fs::record_filesystem(&path);
            }
            return answer;
        };
        let mut request = request;
        let data = match &mut request {
            FsRequest::WriteFile(params) => std::mem::take(&mut params.data_base64),
            _ => ByteChunk::default(),
        };
        let call = HelperRequest::call(&request, 0)?;
        let frame = confined.call(&key, &call, data.as_slice(), &[], cancelled)?;
        answer_to(&request, frame)
    }

    /// Like [`PolicyFiles::call`], with the result type of one method.
    ///
    /// # Errors
    ///
    /// Same as [`PolicyFiles::call`].
    pub fn request<M: FsMethod>(
        &self,
        params: M::Params,
        cancelled: CancelCheck<'_>,
    ) -> Result<M::Result, FsError> {
        let answer = self.call(M::request(params), cancelled)?;
        M::result(answer.into_response()?).ok_or_else(unexpected_response)
    }

    /// Like [`PolicyFiles::call`], if that is possible without waiting. Returns at most `most` bytes of
    /// content.
    pub fn call_at_once(
        &self,
        request: &FsRequest,
        most: usize,
    ) -> Option<Result<FileOutcome, FsError>> {
        if !self.is_direct() {
            return None;
        }
        match request {
            FsRequest::ReadFile(params) => {
                let path = params.path.to_native().ok()?;
                let data = fs::read_at_once(&path, fs::links(params.follow_symlinks), most)?;
                Some(Ok(FileOutcome::Content(data)))
            }
            FsRequest::GetMetadata(params) => {
                let path = params.path.to_native().ok()?;
                let found = fs::metadata_at_once(&path, fs::links(params.follow_symlinks))?;
                Some(
                    found.map(|found| FileOutcome::Response(FsResponse::GetMetadata(found.into()))),
                )
            }
            _ => None,
        }
    }

    /// Starts to read a file, if that is possible without waiting: may be called from async code. A
    /// file of at most `most` bytes is read; a longer one is only opened.
    pub fn call_soon(&self, request: &FsRequest, most: u32) -> Option<ConfinedRead> {
        let confined = self.0.as_ref()?;
        if !matches!(request, FsRequest::ReadFile(_)) {
            return None;
        }
        let helpers = confined.executor.helpers();
        let call = HelperRequest::call(request, most).ok()?;
        if let Some((key, answers)) = helpers.remembered(&confined.sandbox, confined.intent)
            && key.protected == fs::protected_files()
        {
            let asking = helpers.try_request(&key, &call)?;
            // Checked while the helper reads: if the policy resolves differently now, the response
            // is dropped.
            if answers.still_hold() {
                return Some(ConfinedRead(asking));
            }
        }
        let key = confined.key_soon()?;
        helpers.try_request(&key, &call).map(ConfinedRead)
    }

    /// Same as [`OpenFile::open`].
    ///
    /// # Errors
    ///
    /// Like [`OpenFile::open`], or the reason why the policy cannot be enforced.
    pub fn open(
        &self,
        path: &Path,
        mode: OpenMode,
        create: Option<u32>,
    ) -> Result<OpenFile, FsError> {
        let Some(HelperWork { confined, key }) = self.work()? else {
            return OpenFile::open(path, mode, create);
        };
        let frame = confined.request(&key, &HelperRequest::Open(text(path), mode, create))?;
        let opened = match frame.head {
            HelperResponse::File => {
                one(frame.descriptors).map(|file| TransferredFile::Direct(file.into()))
            }
            HelperResponse::Aside(letter) => <[OwnedFd; 2]>::try_from(frame.descriptors)
                .ok()
                .map(|[directory, file]| TransferredFile::Aside(letter, directory, file)),
            _ => None,
        };
        let opened = opened.ok_or_else(unexpected_response)?;
        Ok(OpenFile::received(path, opened, confined.clone()))
    }

    /// Checks that this path may be watched. A watch runs in this process and reports names, so its
    /// policy must allow reading every path, and the path must lead to the same place under it.
    /// May block.
    ///
    /// # Errors
    ///
    /// [`FsError::Params`] if the policy does not allow the watch, or the error of resolving the
    /// path.
    pub fn check_watch(&self, path: &Path) -> Result<(), FsError> {
        let Some(HelperWork { confined, .. }) = self.work()? else {
            return Ok(());
        };
        let refused = |why: &str| {
            FsError::Params(format!(
                "sandbox intent cannot be enforced on this executor: {why}"
            ))
        };
        if !reads_everything(&confined.sandbox) {
            return Err(refused(
                "fs/watch needs a policy that lets everything be read",
            ));
        }
        let params = CanonicalizeParams {
            path: fs::uri_of(path)?,
            sandbox: None,
        };
        let inside = self.request::<Canonicalize>(params, &|| false)?.path;
        let inside = fs::native(&inside)?;
        let synthetic = ["/proc", "/dev"]
            .iter()
            .any(|name| inside.starts_with(name));
        if synthetic || inside != fs::canonicalize(path)? {
            let path = inside.display();
            return Err(refused(&format!(
                "fs/watch of `{path}`, which differs under the policy"
            )));
        }
        Ok(())
    }

    /// Returns the helper key of an operation, or `None` if it runs in this process. Reads the
    /// disk.
    fn work(&self) -> Result<Option<HelperWork<'_>>, FsError> {
        let Some(confined) = &self.0 else {
            return Ok(None);
        };
        let key = confined.key()?;
        Ok(key.map(|key| HelperWork { confined, key }))
    }
}

/// Operation that needs a helper, and the key of that helper.
struct HelperWork<'a> {
    confined: &'a ConfinedFiles,
    key: Arc<HelperKey>,
}

/// Converts the response of a helper to the result of a request.
fn answer_to(
    request: &FsRequest,
    frame: HelperFrame<HelperResponse>,
) -> Result<FileOutcome, FsError> {
    Ok(match (request, frame.head) {
        (FsRequest::ReadFile(_), HelperResponse::Content) => FileOutcome::Content(frame.tail),
        (FsRequest::ReadFile(params), HelperResponse::File) => FileOutcome::File {
            path: fs::native(&params.path)?,
            file: one(frame.descriptors)
                .ok_or_else(unexpected_response)?
                .into(),
        },
        (FsRequest::ReadDirectory(params), HelperResponse::Directory(found))
            if found.is_whole() =>
        {
            let path = params.path.clone();
            FileOutcome::Directory { path, found }
        }
        (FsRequest::Walk(_), HelperResponse::Walked(walked)) if walked.is_whole() => {
            FileOutcome::Walked(walked)
        }
        (request, HelperResponse::Response(text)) => {
            let mut response = request
                .decode_response(&text)
                .map_err(|_| unexpected_response())?;
            let entry = frame.descriptors.first();
            if let FsResponse::GetMetadata(found) = &mut response
                && let Some(stat) = entry.and_then(|entry| rustix::fs::fstat(entry).ok())
            {
                (found.uid, found.gid) = (Some(stat.st_uid), Some(stat.st_gid));
            }
            FileOutcome::Response(response)
        }
        _ => return Err(unexpected_response()),
    })
}

/// File read that runs in a confined helper.
#[derive(Debug)]
pub struct ConfinedRead(PendingHelperRequest);

impl ConfinedRead {
    /// Waits for the response. Returns `None` if the request must be repeated with [`PolicyFiles::call`].
    pub async fn finish(self, request: &FsRequest) -> Option<Result<FileOutcome, FsError>> {
        let frame = self.0.answer().await?;
        if let HelperResponse::Failed(error) = frame.head {
            return Some(Err(error));
        }
        answer_to(request, frame).ok().map(Ok)
    }
}

impl ConfinedFiles {
    /// Resolves the policy against the current disk; `None` if it restricts nothing.
    fn key(&self) -> Result<Option<Arc<HelperKey>>, FsError> {
        Ok(self.key_on(&RealDisk)?.map(Arc::new))
    }

    /// Returns the key of the helper, with the policy resolved on `disk`.
    fn key_on(&self, disk: &dyn Disk) -> Result<Option<HelperKey>, FsError> {
        let config = self.executor.config();
        let context = PolicyDirectories {
            env: &config.environment,
            disk,
            hidden: &config.hidden,
            reads_only: self.intent == FileIntent::Read,
        };
        let mut policy = policy::resolve(&self.sandbox, &context)
            .map_err(|error| FsError::Policy(error.to_string()))?;
        let Some(view) = &mut policy.view else {
            return Ok(None);
        };
        if self.intent == FileIntent::Read {
            // Reading needs neither write access nor placeholders for missing names.
            for path in std::mem::take(&mut view.missing) {
                view.rules.remove(&path);
            }
            for access in view.rules.values_mut() {
                if *access == PathAccess::Write {
                    *access = PathAccess::Read;
                }
            }
        }
        policy.network = NetworkPermission::Restricted;
        Ok(Some(HelperKey {
            policy,
            allow_partial: self.sandbox.allow_partial_enforcement,
            protected: fs::protected_files(),
        }))
    }

    /// Resolves the policy, if that is possible without waiting for the disk.
    fn key_soon(&self) -> Option<Arc<HelperKey>> {
        let helpers = self.executor.helpers();
        // A long policy would delay other tasks of this thread, so it is resolved on another
        // thread.
        if !self.sandbox.is_short() {
            return None;
        }
        let disk = CachedDisk::default();
        let key = Arc::new(self.key_on(&disk).ok()??);
        // A result that is based on missing answers must not be used.
        if !disk.is_complete() {
            return None;
        }
        let remembered = CachedResolution {
            sandbox: Arc::clone(&self.sandbox),
            intent: self.intent,
            answers: Arc::new(disk.answers()),
            key: Arc::clone(&key),
        };
        helpers.remember(remembered);
        Some(key)
    }

    fn request(
        &self,
        key: &Arc<HelperKey>,
        request: &HelperRequest,
    ) -> Result<HelperFrame<HelperResponse>, FsError> {
        self.call(key, request, &[], &[], &|| false)
    }

    fn call(
        &self,
        key: &Arc<HelperKey>,
        request: &HelperRequest,
        tail: &[u8],
        descriptors: &[BorrowedFd<'_>],
        cancelled: CancelCheck<'_>,
    ) -> Result<HelperFrame<HelperResponse>, FsError> {
        let helpers = self.executor.helpers();
        let frame = helpers.call(&self.executor, key, request, tail, descriptors, cancelled)?;
        match frame.head {
            HelperResponse::Failed(error) => Err(error),
            _ => Ok(frame),
        }
    }
}

impl ConfinedRename for ConfinedFiles {
    fn rename_into_place(
        &self,
        path: &Path,
        letter: ReplacementDescription,
        descriptors: [BorrowedFd<'_>; 2],
    ) -> Result<(), FsError> {
        let Some(key) = self.key()? else {
            let lost = |_| FsError::Helper("out of descriptors".to_owned());
            let [directory, file] = descriptors.map(|fd| fd.try_clone_to_owned().map_err(lost));
            return fs::rename_into_place(path, letter, directory?, file?);
        };
        let request = HelperRequest::Place(text(path), letter);
        match self
            .call(&key, &request, &[], &descriptors, &|| false)?
            .head
        {
            HelperResponse::Placed => Ok(()),
            _ => Err(unexpected_response()),
        }
    }
}

fn one(descriptors: Vec<OwnedFd>) -> Option<OwnedFd> {
    descriptors.into_iter().next()
}

fn unexpected_response() -> FsError {
    FsError::Helper("it returned the response to another request".to_owned())
}
