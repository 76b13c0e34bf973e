//! File work, wherever its policy wants it done: here, or in a confined process.
//!
//! The functions are those of [`crate::fs`], with the same results and the same errors.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use exec_server_protocol::fs::{OpenMode, SearchParams, SearchResult, WalkOptions};
use exec_server_protocol::sandbox::{
    Access, EntryPath, FileSystem, Network, Permissions, Sandbox, Special,
};

use super::helper::{Answer, Frame, Request};
use super::policy::{self, CachedDisk, Context, Disk, RealDisk};
use super::pool::{Asking, Key, Remembered};
use crate::executor::Executor;
use crate::fs::search::{self, SearchError};
use crate::fs::wire::{is_whole, is_whole_walk, path_of, text};
use crate::fs::{
    self, Attributes, Cancelled, FsError, Letter, Links, Listing, Metadata, OpenFile, Opened,
    Walked,
};

/// What file work does to files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Intent {
    /// It only looks.
    Read,
    /// It changes something.
    Write,
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
pub fn reads_everything(sandbox: &Sandbox) -> bool {
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
pub fn depends_on_directory(sandbox: &Sandbox) -> bool {
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
    pub(crate) fn new(executor: &Executor, sandbox: Option<Sandbox>, intent: Intent) -> Self {
        let free = |sandbox: &Sandbox| match sandbox.permissions {
            Permissions::Managed {
                file_system: FileSystem::Restricted { .. },
                ..
            } => intent == Intent::Read && reads_everything(sandbox),
            _ => true,
        };
        Self(
            sandbox
                .filter(|sandbox| !free(sandbox))
                .map(|sandbox| Confined {
                    executor: executor.clone(),
                    sandbox: Arc::new(sandbox),
                    intent,
                }),
        )
    }

    /// Here, bound by nothing.
    pub fn direct() -> Self {
        Self(None)
    }

    /// Whether the work is done right here.
    pub fn is_direct(&self) -> bool {
        self.0.is_none()
    }

    /// As [`fs::metadata`].
    ///
    /// # Errors
    ///
    /// As there, or what keeps the work from being done under its policy.
    pub fn metadata(&self, path: &Path, links: Links) -> Result<Metadata, FsError> {
        let Some(Work { confined, key }) = self.work()? else {
            return fs::metadata(path, links);
        };
        match confined.ask(&key, &Request::Metadata(text(path), links))? {
            Frame {
                head: Answer::Metadata(mut found),
                descriptors,
                ..
            } => {
                let owners = descriptors
                    .first()
                    .and_then(|fd| rustix::fs::fstat(fd).ok());
                if let Some(stat) = owners {
                    (found.uid, found.gid) = (stat.st_uid, stat.st_gid);
                }
                Ok(found)
            }
            other => Err(odd(other.head)),
        }
    }

    /// As [`fs::open_file`].
    ///
    /// # Errors
    ///
    /// As there, or what keeps the work from being done under its policy.
    pub fn open_file(&self, path: &Path, links: Links) -> Result<File, FsError> {
        let Some(Work { confined, key }) = self.work()? else {
            return fs::open_file(path, links);
        };
        let frame = confined.ask(&key, &Request::OpenFile(text(path), links))?;
        match (frame.head, one(frame.descriptors)) {
            (Answer::File, Some(file)) => Ok(file.into()),
            (other, _) => Err(odd(other)),
        }
    }

    /// Begins to read a file, if everything that takes is at hand: may be called where nothing may
    /// block, inside a runtime.
    pub fn read_soon(&self, path: &Path, links: Links, most: u32) -> Option<Reading> {
        let confined = self.0.as_ref()?;
        let helpers = confined.executor.helpers();
        let request = Request::ReadFile(text(path), links, most);
        if let Some((key, answers)) = helpers.remembered(&confined.sandbox, confined.intent) {
            let asking = helpers.ask_soon(&key, &request)?;
            // Looked at while it reads: nobody hears what it finds if the policy means something else.
            if answers.still_hold() {
                return Some(Reading(asking));
            }
        }
        let key = confined.key_soon()?;
        helpers.ask_soon(&key, &request).map(Reading)
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
            Answer::File => one(frame.descriptors).map(|file| Opened::Direct(file.into())),
            Answer::Aside(letter) => <[OwnedFd; 2]>::try_from(frame.descriptors)
                .ok()
                .map(|[directory, file]| Opened::Aside(letter, directory, file)),
            other => return Err(odd(other)),
        };
        match opened {
            Some(opened) => Ok(OpenFile::received(path, opened, confined.clone())),
            None => Err(odd(Answer::File)),
        }
    }

    /// As [`fs::write_file`].
    ///
    /// # Errors
    ///
    /// As there, or what keeps the work from being done under its policy.
    pub fn write_file(
        &self,
        path: &Path,
        data: &[u8],
        links: Links,
        attributes: Attributes,
    ) -> Result<(), FsError> {
        let Some(Work { confined, key }) = self.work()? else {
            return fs::write_file(path, data, links, attributes);
        };
        let request = Request::WriteFile(text(path), links, attributes);
        let answer = confined.call(&key, &request, data, &[], &|| false)?;
        done(answer.head)
    }

    /// As [`fs::create_directory`].
    ///
    /// # Errors
    ///
    /// As there, or what keeps the work from being done under its policy.
    pub fn create_directory(
        &self,
        path: &Path,
        recursive: bool,
        links: Links,
    ) -> Result<(), FsError> {
        let Some(Work { confined, key }) = self.work()? else {
            return fs::create_directory(path, recursive, links);
        };
        let request = Request::CreateDirectory {
            path: text(path),
            recursive,
            links,
        };
        done(confined.ask(&key, &request)?.head)
    }

    /// As [`fs::read_directory`], or [`fs::read_directory_with_links`].
    ///
    /// # Errors
    ///
    /// As there, or what keeps the work from being done under its policy.
    pub fn read_directory(
        &self,
        path: &Path,
        with_links: bool,
        cancelled: Cancelled<'_>,
    ) -> Result<(Listing, HashMap<usize, PathBuf>), FsError> {
        let Some(Work { confined, key }) = self.work()? else {
            return match with_links {
                true => fs::read_directory_with_links(path, cancelled),
                false => Ok((fs::read_directory(path, cancelled)?, HashMap::new())),
            };
        };
        let request = Request::ReadDirectory {
            path: text(path),
            with_links,
        };
        match confined.call(&key, &request, &[], &[], cancelled)?.head {
            Answer::Listing(listing, targets) if is_whole(&listing) => {
                let targets = targets
                    .into_iter()
                    .map(|(position, target)| (position, path_of(target)))
                    .collect();
                Ok((listing, targets))
            }
            other => Err(odd(other)),
        }
    }

    /// As [`fs::walk`](fn@fs::walk).
    ///
    /// # Errors
    ///
    /// As there, or what keeps the work from being done under its policy.
    pub fn walk(
        &self,
        root: &Path,
        options: WalkOptions,
        cancelled: Cancelled<'_>,
    ) -> Result<Walked, FsError> {
        let Some(Work { confined, key }) = self.work()? else {
            return fs::walk(root, options, cancelled);
        };
        let request = Request::Walk(text(root), options.into());
        match confined.call(&key, &request, &[], &[], cancelled)?.head {
            Answer::Walked(walked) if is_whole_walk(&walked) => Ok(walked),
            other => Err(odd(other)),
        }
    }

    /// As [`fs::remove`].
    ///
    /// # Errors
    ///
    /// As there, or what keeps the work from being done under its policy.
    pub fn remove(
        &self,
        path: &Path,
        recursive: bool,
        force: bool,
        links: Links,
    ) -> Result<(), FsError> {
        let Some(Work { confined, key }) = self.work()? else {
            return fs::remove(path, recursive, force, links);
        };
        let request = Request::Remove {
            path: text(path),
            recursive,
            force,
            links,
        };
        done(confined.ask(&key, &request)?.head)
    }

    /// As [`fs::copy`].
    ///
    /// # Errors
    ///
    /// As there, or what keeps the work from being done under its policy.
    pub fn copy(
        &self,
        from: &Path,
        to: &Path,
        recursive: bool,
        cancelled: Cancelled<'_>,
    ) -> Result<(), FsError> {
        let Some(Work { confined, key }) = self.work()? else {
            return fs::copy(from, to, recursive, cancelled);
        };
        let request = Request::Copy {
            from: text(from),
            to: text(to),
            recursive,
        };
        done(confined.call(&key, &request, &[], &[], cancelled)?.head)
    }

    /// As [`fs::rename`].
    ///
    /// # Errors
    ///
    /// As there, or what keeps the work from being done under its policy.
    pub fn rename(
        &self,
        from: &Path,
        to: &Path,
        overwrite: bool,
        cancelled: Cancelled<'_>,
    ) -> Result<(), FsError> {
        let Some(Work { confined, key }) = self.work()? else {
            return fs::rename(from, to, overwrite, cancelled);
        };
        let request = Request::Rename {
            from: text(from),
            to: text(to),
            overwrite,
        };
        done(confined.call(&key, &request, &[], &[], cancelled)?.head)
    }

    /// As [`fs::canonicalize`].
    ///
    /// # Errors
    ///
    /// As there, or what keeps the work from being done under its policy.
    pub fn canonicalize(&self, path: &Path) -> Result<PathBuf, FsError> {
        let Some(Work { confined, key }) = self.work()? else {
            return fs::canonicalize(path);
        };
        match confined.ask(&key, &Request::Canonicalize(text(path)))?.head {
            Answer::Path(path) => Ok(path_of(path)),
            other => Err(odd(other)),
        }
    }

    /// As [`fs::set_metadata`].
    ///
    /// # Errors
    ///
    /// As there, or what keeps the work from being done under its policy.
    pub fn set_metadata(
        &self,
        path: &Path,
        attributes: Attributes,
        links: Links,
    ) -> Result<(), FsError> {
        let Some(Work { confined, key }) = self.work()? else {
            return fs::set_metadata(path, attributes, links);
        };
        let request = Request::SetMetadata(text(path), attributes, links);
        done(confined.ask(&key, &request)?.head)
    }

    /// As [`fs::create_symlink`].
    ///
    /// # Errors
    ///
    /// As there, or what keeps the work from being done under its policy.
    pub fn create_symlink(&self, path: &Path, target: &Path) -> Result<(), FsError> {
        let Some(Work { confined, key }) = self.work()? else {
            return fs::create_symlink(path, target);
        };
        let request = Request::CreateSymlink {
            path: text(path),
            target: text(target),
        };
        done(confined.ask(&key, &request)?.head)
    }

    /// As [`fs::hash`].
    ///
    /// # Errors
    ///
    /// As there, or what keeps the work from being done under its policy.
    pub fn hash(
        &self,
        path: &Path,
        length: Option<u64>,
        cancelled: Cancelled<'_>,
    ) -> Result<([u8; 32], u64), FsError> {
        let Some(Work { confined, key }) = self.work()? else {
            return fs::hash(path, length, cancelled);
        };
        let request = Request::Hash(text(path), length);
        match confined.call(&key, &request, &[], &[], cancelled)?.head {
            Answer::Hash(digest, length) => Ok((digest, length)),
            other => Err(odd(other)),
        }
    }

    /// As [`search::search`].
    ///
    /// # Errors
    ///
    /// As there, or what keeps the work from being done under its policy.
    pub fn search(
        &self,
        root: &Path,
        params: &SearchParams,
        cancelled: &AtomicBool,
    ) -> Result<SearchResult, SearchError> {
        let Some(Work { confined, key }) = self.work()? else {
            return search::search(root, params, cancelled);
        };
        let request = Request::Search(text(root), params.into());
        let stop = || cancelled.load(Ordering::Relaxed);
        match confined.call(&key, &request, &[], &[], &stop)?.head {
            Answer::Found(found) => Ok(found.into()),
            Answer::Pattern(why) => Err(SearchError::Told(why)),
            other => Err(odd(other).into()),
        }
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

/// What comes of [`Files::read_soon`].
#[derive(Debug)]
pub enum Soon {
    /// All that is in the file.
    Content(Vec<u8>),
    /// A file that is too long for that.
    File(File),
}

/// A file that is being read.
#[derive(Debug)]
pub struct Reading(Asking);

impl Reading {
    /// What comes of it; nothing if the file has to be asked for properly after all. Whoever has
    /// nothing else to do may look for it for a moment before waiting.
    pub async fn finish(self, look: bool) -> Option<Result<Soon, FsError>> {
        let frame = self.0.answer(look).await?;
        Some(match frame.head {
            Answer::Content => Ok(Soon::Content(frame.tail)),
            Answer::File => Ok(Soon::File(one(frame.descriptors)?.into())),
            Answer::Failed(fault) => Err(fault.into()),
            _ => return None,
        })
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

    fn ask(&self, key: &Arc<Key>, request: &Request) -> Result<Frame<Answer>, FsError> {
        self.call(key, request, &[], &[], &|| false)
    }

    fn call(
        &self,
        key: &Arc<Key>,
        request: &Request,
        tail: &[u8],
        descriptors: &[BorrowedFd<'_>],
        cancelled: Cancelled<'_>,
    ) -> Result<Frame<Answer>, FsError> {
        let helpers = self.executor.helpers();
        let frame = helpers.call(&self.executor, key, request, tail, descriptors, cancelled)?;
        match frame.head {
            Answer::Failed(fault) => Err(fault.into()),
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
        let answer = self.call(&key, &request, &[], &descriptors, &|| false)?;
        done(answer.head)
    }
}

fn one(descriptors: Vec<OwnedFd>) -> Option<OwnedFd> {
    descriptors.into_iter().next()
}

fn done(answer: Answer) -> Result<(), FsError> {
    match answer {
        Answer::Done => Ok(()),
        other => Err(odd(other)),
    }
}

fn odd(_: Answer) -> FsError {
    FsError::Helper("it gave an answer to another question".to_owned())
}
