//! File requests under a policy: done in this process, or in a confined one.
//!
//! What a request does is the same in both, and lies in [`crate::fs`].

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use exec_server_protocol::chunk::ByteChunk;
use exec_server_protocol::fs::{FsMethod, FsRequest, FsResponse, OpenMode};
use exec_server_protocol::sandbox::{
    Access, EntryPath, FileSystem, Network, Permissions, Sandbox, Special,
};

use super::helper::{Frame, Reply, Request};
use super::policy::{self, CachedDisk, Context, Disk, RealDisk};
use super::pool::{Asking, Key, Remembered};
use crate::executor::Executor;
use crate::fs::wire::text;
use crate::fs::{self, Answer, Cancelled, FsError, Letter, OpenFile, Opened};

/// What file work does to files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Intent {
    /// It only looks.
    Read,
    /// It changes something.
    Write,
}

impl Intent {
    /// What a request does.
    pub fn of(request: &FsRequest) -> Self {
        if request.writes() {
            Self::Write
        } else {
            Self::Read
        }
    }
}

/// Where file work is done; cheap to clone.
#[derive(Debug, Clone)]
pub struct Files(Option<Confined>);

/// File work that a policy binds.
#[derive(Debug, Clone)]
pub(crate) struct Confined {
    executor: Executor,
    sandbox: Arc<Sandbox>,
    intent: Intent,
}

/// Whether a policy lets everything be read: then reading needs nobody else.
///
/// What the server hides from sandboxed commands is no secret from whoever may name a policy.
fn reads_everything(sandbox: &Sandbox) -> bool {
    let Permissions::Managed {
        file_system: FileSystem::Restricted { entries, .. },
        ..
    } = &sandbox.permissions
    else {
        return true;
    };
    let is_root = |path: &EntryPath| {
        matches!(
            path,
            EntryPath::Special {
                value: Special::Root
            }
        )
    };
    entries
        .iter()
        .any(|entry| is_root(&entry.path) && entry.access != Access::Deny)
        && entries.iter().all(|entry| entry.access != Access::Deny)
}

/// Whether what a policy means depends on where its caller is.
fn depends_on_directory(sandbox: &Sandbox) -> bool {
    let Permissions::Managed {
        file_system: FileSystem::Restricted { entries, .. },
        ..
    } = &sandbox.permissions
    else {
        return false;
    };
    entries.iter().any(|entry| match &entry.path {
        EntryPath::Special { value } => matches!(value, Special::ProjectRoots { .. }),
        EntryPath::GlobPattern { pattern } => !pattern.starts_with('/'),
        EntryPath::Path { .. } => false,
    })
}

impl Files {
    /// Where work under this policy is done. Touches nothing yet.
    pub(crate) fn new(
        executor: &Executor,
        sandbox: Option<Sandbox>,
        intent: Intent,
    ) -> Result<Self, FsError> {
        let free = |sandbox: &Sandbox| match sandbox.permissions {
            Permissions::Managed {
                file_system: FileSystem::Restricted { .. },
                ..
            } => intent == Intent::Read && reads_everything(sandbox),
            _ => true,
        };
        let Some(sandbox) = sandbox.filter(|sandbox| !free(sandbox)) else {
            return Ok(Self(None));
        };
        let context = sandbox.policy_context.as_ref();
        let cwd = context.and_then(|context| context.cwd.as_ref());
        if depends_on_directory(&sandbox) && cwd.or(sandbox.cwd.as_ref()).is_none() {
            return Err(FsError::Params(
                "file system sandbox context with dynamic permissions requires cwd".to_owned(),
            ));
        }
        Ok(Self(Some(Confined {
            executor: executor.clone(),
            sandbox: Arc::new(sandbox),
            intent,
        })))
    }

    /// Whether the work is done in this process.
    pub fn is_direct(&self) -> bool {
        self.0.is_none()
    }

    /// Does what a request asks. May block.
    ///
    /// # Errors
    ///
    /// Whatever the system says, or what keeps the work from being done under its policy.
    pub fn call(&self, request: FsRequest, cancelled: Cancelled<'_>) -> Result<Answer, FsError> {
        let Some(Work { confined, key }) = self.work()? else {
            let learnt = match &request {
                FsRequest::ReadFile(params) if self.is_direct() => params.path.to_native().ok(),
                FsRequest::GetMetadata(params) if self.is_direct() => params.path.to_native().ok(),
                _ => None,
            };
            let answer = fs::perform(request, cancelled);
            if let Some(path) = learnt {
                fs::learn(&path);
            }
            return answer;
        };
        let mut request = request;
        let data = match &mut request {
            FsRequest::WriteFile(params) => std::mem::take(&mut params.data_base64),
            _ => ByteChunk::default(),
        };
        let call = Request::call(&request, 0);
        let frame = confined.call(&key, &call, data.as_slice(), &[], cancelled)?;
        answer_to(&request, frame)
    }

    /// As [`Files::call`], with the result of one method.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn ask<M: FsMethod>(
        &self,
        params: M::Params,
        cancelled: Cancelled<'_>,
    ) -> Result<M::Result, FsError> {
        let answer = self.call(M::request(params), cancelled)?;
        M::result(answer.into_response()?).ok_or_else(odd)
    }

    /// As [`Files::call`], if that is possible without waiting, for a content of at most so many bytes.
    pub fn call_at_once(
        &self,
        request: &FsRequest,
        most: usize,
    ) -> Option<Result<Answer, FsError>> {
        if !self.is_direct() {
            return None;
        }
        match request {
            FsRequest::ReadFile(params) => {
                let path = params.path.to_native().ok()?;
                let data = fs::read_at_once(&path, fs::links(params.follow_symlinks), most)?;
                Some(Ok(Answer::Content(data)))
            }
            FsRequest::GetMetadata(params) => {
                let path = params.path.to_native().ok()?;
                let found = fs::metadata_at_once(&path, fs::links(params.follow_symlinks))?;
                Some(found.map(|found| Answer::Response(FsResponse::GetMetadata(found.into()))))
            }
            _ => None,
        }
    }

    /// Begins to read a file, if everything that takes is at hand: may be called where nothing may
    /// block, inside a runtime. A content of at most so many bytes is read, a longer file opened.
    pub fn call_soon(&self, request: &FsRequest, most: u32) -> Option<Reading> {
        let confined = self.0.as_ref()?;
        if !matches!(request, FsRequest::ReadFile(_)) {
            return None;
        }
        let helpers = confined.executor.helpers();
        let call = Request::call(request, most);
        if let Some((key, answers)) = helpers.remembered(&confined.sandbox, confined.intent) {
            let asking = helpers.ask_soon(&key, &call)?;
            // Looked at while it reads: nobody hears what it finds if the policy means something else.
            if answers.still_hold() {
                return Some(Reading(asking));
            }
        }
        let key = confined.key_soon()?;
        helpers.ask_soon(&key, &call).map(Reading)
    }

    /// As [`OpenFile::open`].
    ///
    /// # Errors
    ///
    /// As there, or what keeps the work from being done under its policy.
    pub fn open(&self, path: &Path, mode: OpenMode) -> Result<OpenFile, FsError> {
        let Some(Work { confined, key }) = self.work()? else {
            return OpenFile::open(path, mode);
        };
        let frame = confined.ask(&key, &Request::Open(text(path), mode))?;
        let opened = match frame.head {
            Reply::File => one(frame.descriptors).map(|file| Opened::Direct(file.into())),
            Reply::Aside(letter) => <[OwnedFd; 2]>::try_from(frame.descriptors)
                .ok()
                .map(|[directory, file]| Opened::Aside(letter, directory, file)),
            _ => None,
        };
        let opened = opened.ok_or_else(odd)?;
        Ok(OpenFile::received(path, opened, confined.clone()))
    }

    /// Refuses a policy under which nothing can be watched.
    ///
    /// # Errors
    ///
    /// [`FsError::Params`].
    pub fn check_watchable(&self) -> Result<(), FsError> {
        if self.is_direct() {
            return Ok(());
        }
        Err(FsError::Params(
            "sandbox intent cannot be enforced on this executor: fs/watch needs a policy that lets \
             everything be read"
                .to_owned(),
        ))
    }

    /// What has to be done elsewhere, if it has to be. Looks at the disk.
    fn work(&self) -> Result<Option<Work<'_>>, FsError> {
        let Some(confined) = &self.0 else {
            return Ok(None);
        };
        let key = confined.key()?;
        Ok(key.map(|key| Work { confined, key }))
    }
}

/// Work that a policy binds, and who may do it.
struct Work<'a> {
    confined: &'a Confined,
    key: Arc<Key>,
}

/// What a confined process has answered to a request.
fn answer_to(request: &FsRequest, frame: Frame<Reply>) -> Result<Answer, FsError> {
    Ok(match (request, frame.head) {
        (FsRequest::ReadFile(_), Reply::Content) => Answer::Content(frame.tail),
        (FsRequest::ReadFile(params), Reply::File) => Answer::File {
            path: fs::native(&params.path)?,
            file: one(frame.descriptors).ok_or_else(odd)?.into(),
        },
        (FsRequest::ReadDirectory(params), Reply::Directory(found)) if found.is_whole() => {
            let path = params.path.clone();
            Answer::Directory { path, found }
        }
        (FsRequest::Walk(_), Reply::Walked(walked)) if walked.is_whole() => Answer::Walked(walked),
        (request, Reply::Response(text)) => {
            let mut response = request.decode_response(&text).map_err(|_| odd())?;
            let entry = frame.descriptors.first();
            if let FsResponse::GetMetadata(found) = &mut response
                && let Some(stat) = entry.and_then(|entry| rustix::fs::fstat(entry).ok())
            {
                (found.uid, found.gid) = (Some(stat.st_uid), Some(stat.st_gid));
            }
            Answer::Response(response)
        }
        _ => return Err(odd()),
    })
}

/// A file that a confined process was asked to read.
#[derive(Debug)]
pub struct Reading(Asking);

impl Reading {
    /// The answer to the request; nothing if it has to be asked again with [`Files::call`]. If `look` is
    /// set, looks for it for a moment before waiting.
    pub async fn finish(self, request: &FsRequest, look: bool) -> Option<Result<Answer, FsError>> {
        let frame = self.0.answer(look).await?;
        if let Reply::Failed(error) = frame.head {
            return Some(Err(error));
        }
        answer_to(request, frame).ok().map(Ok)
    }
}

impl Confined {
    /// What the policy means right now; `None` if it binds nothing.
    fn key(&self) -> Result<Option<Arc<Key>>, FsError> {
        Ok(self.key_on(&RealDisk)?.map(Arc::new))
    }

    /// The same, as a disk has it.
    fn key_on(&self, disk: &dyn Disk) -> Result<Option<Key>, FsError> {
        let config = self.executor.config();
        let context = Context {
            env: &config.environment,
            disk,
            hidden: &config.hidden,
            reads_only: self.intent == Intent::Read,
        };
        let mut policy = policy::resolve(&self.sandbox, &context)
            .map_err(|error| FsError::Policy(error.to_string()))?;
        let Some(view) = &mut policy.view else {
            return Ok(None);
        };
        if self.intent == Intent::Read {
            // Who only looks needs neither leave to write nor places for what must not be made.
            for path in std::mem::take(&mut view.missing) {
                view.rules.remove(&path);
            }
            for access in view.rules.values_mut() {
                if *access == Access::Write {
                    *access = Access::Read;
                }
            }
        }
        policy.network = Network::Restricted;
        Ok(Some(Key {
            policy,
            allow_partial: self.sandbox.allow_partial_enforcement,
        }))
    }

    /// What the policy means right now, if that can be told without waiting for the disk.
    fn key_soon(&self) -> Option<Arc<Key>> {
        let helpers = self.executor.helpers();
        // What others would have to wait for is done elsewhere.
        if !self.sandbox.is_short() {
            return None;
        }
        let disk = CachedDisk::default();
        let key = Arc::new(self.key_on(&disk).ok()??);
        // Whatever was made of what could not be told is worth nothing.
        if !disk.has_told_all() {
            return None;
        }
        let remembered = Remembered {
            sandbox: Arc::clone(&self.sandbox),
            intent: self.intent,
            answers: Arc::new(disk.answers()),
            key: Arc::clone(&key),
        };
        helpers.remember(remembered);
        Some(key)
    }

    fn ask(&self, key: &Arc<Key>, request: &Request) -> Result<Frame<Reply>, FsError> {
        self.call(key, request, &[], &[], &|| false)
    }

    fn call(
        &self,
        key: &Arc<Key>,
        request: &Request,
        tail: &[u8],
        descriptors: &[BorrowedFd<'_>],
        cancelled: Cancelled<'_>,
    ) -> Result<Frame<Reply>, FsError> {
        let helpers = self.executor.helpers();
        let frame = helpers.call(&self.executor, key, request, tail, descriptors, cancelled)?;
        match frame.head {
            Reply::Failed(error) => Err(error),
            _ => Ok(frame),
        }
    }

    /// Puts in place what was written aside.
    pub(crate) fn place(
        &self,
        path: &Path,
        letter: Letter,
        descriptors: [BorrowedFd<'_>; 2],
    ) -> Result<(), FsError> {
        let Some(key) = self.key()? else {
            let lost = |_| FsError::Helper("out of descriptors".to_owned());
            let [directory, file] = descriptors.map(|fd| fd.try_clone_to_owned().map_err(lost));
            return fs::place(path, letter, directory?, file?);
        };
        let request = Request::Place(text(path), letter);
        match self
            .call(&key, &request, &[], &descriptors, &|| false)?
            .head
        {
            Reply::Placed => Ok(()),
            _ => Err(odd()),
        }
    }
}

fn one(descriptors: Vec<OwnedFd>) -> Option<OwnedFd> {
    descriptors.into_iter().next()
}

fn odd() -> FsError {
    FsError::Helper("it gave an answer to another question".to_owned())
}
