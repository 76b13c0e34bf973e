//! Names of large directories, kept for the next pages of a listing.
//!
//! A directory has no order in which reading could continue, so each page would read all names
//! again: the cost of a listing would grow with the square of the number of names. The first page
//! of a listing is always read; later pages use the names that are kept, if the directory has not
//! changed meanwhile.

use std::cell::Cell;
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use exec_server_sync::Mutex;

use super::CancelCheck;
use super::directory::{DirectoryListing, EntryType, NameLimits, ReadError, order, read_first};

/// Names that are read beyond a page. One million names, in pages of at least 1,000, are read five
/// times.
const WINDOW_NAMES: usize = 200_000;

/// Directories with fewer names are read again for each page.
const MIN_NAMES: usize = 1024;

/// Bytes of memory of the names of one listing, about; see [`read_first`].
const WINDOW_BYTES: usize = 8 << 20;

/// Bytes that are kept for all listings together.
const ALL_BYTES: usize = 2 * WINDOW_BYTES;

/// How long names are kept after their last use.
const TIME: Duration = Duration::from_secs(5);

/// Types of the entries that a listing contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ListedTypes {
    All,
    DirectoriesAndFiles,
}

impl ListedTypes {
    fn include(self, kind: EntryType) -> bool {
        self == Self::All || matches!(kind, EntryType::Directory | EntryType::File)
    }
}

/// Identity of a directory, the time of its last change, and the names that are listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DirectoryVersion {
    device: u64,
    inode: u64,
    modified: (i64, i64),
    types: ListedTypes,
}

impl DirectoryVersion {
    fn of(directory: impl AsFd, types: ListedTypes) -> Option<Self> {
        let stat = rustix::fs::fstat(directory).ok()?;
        Some(Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            modified: (stat.st_mtime, stat.st_mtime_nsec as i64),
            types,
        })
    }
}

/// Names of one directory, in order.
#[derive(Debug)]
struct KeptNames {
    directory: DirectoryVersion,
    /// All names come after this one; empty if they are the first.
    after: Vec<u8>,
    /// There are no names after these.
    is_complete: bool,
    names: Arc<DirectoryListing>,
    used: Instant,
}

impl KeptNames {
    /// Whether the `count` names after this one are here.
    fn contain(&self, after: &[u8], count: usize) -> bool {
        let begin = self.after.is_empty() || order(after, &self.after).is_ge();
        let enough = || self.names.len() - self.names.position_after(after) >= count;
        begin && (self.is_complete || enough())
    }
}

/// The kept names, oldest first.
#[derive(Debug)]
struct AllKeptNames {
    listings: VecDeque<KeptNames>,
    /// Whether a thread removes listings that are not used any more.
    has_thread: bool,
}

static KEPT: Mutex<AllKeptNames> = Mutex::new(AllKeptNames {
    listings: VecDeque::new(),
    has_thread: false,
});

/// Bytes of [`KEPT`].
static BYTES: AtomicUsize = AtomicUsize::new(0);

/// Bytes of memory of names that are kept for the next pages of listings.
pub fn kept_names_bytes() -> usize {
    BYTES.load(Ordering::Relaxed)
}

impl AllKeptNames {
    fn find(
        &mut self,
        directory: DirectoryVersion,
        after: &[u8],
        count: usize,
    ) -> Option<Arc<DirectoryListing>> {
        let mut listings = self.listings.iter_mut();
        let found =
            listings.find(|kept| kept.directory == directory && kept.contain(after, count))?;
        found.used = Instant::now();
        Some(Arc::clone(&found.names))
    }

    fn keep(&mut self, new: KeptNames) {
        let DirectoryVersion { device, inode, .. } = new.directory;
        self.listings.retain(|kept| {
            let other = kept.directory;
            (other.device, other.inode) != (device, inode)
        });
        self.listings.push_back(new);
        while self.bytes() > ALL_BYTES {
            self.listings.pop_front();
        }
        self.count();
        if !self.has_thread && !self.listings.is_empty() {
            let thread = std::thread::Builder::new().name("kept-names".to_owned());
            // Ends when no names are kept. Without it, they are kept until the next listing.
            self.has_thread = thread.spawn(expire).is_ok();
        }
    }

    fn bytes(&self) -> usize {
        self.listings.iter().map(|kept| kept.names.memory()).sum()
    }

    fn count(&self) {
        BYTES.store(self.bytes(), Ordering::Relaxed);
    }
}

/// Removes listings that were not used for [`TIME`], until none is left.
fn expire() {
    loop {
        std::thread::sleep(TIME / 5);
        let mut kept = KEPT.lock();
        kept.listings.retain(|one| one.used.elapsed() < TIME);
        kept.count();
        if kept.listings.is_empty() {
            kept.listings = VecDeque::new();
            kept.has_thread = false;
            return;
        }
    }
}

/// Adds the first names of these types after `after` to `names`, at most `limits.count`, in the order
/// of [`DirectoryListing::sort`]. Keeps the names read so far when it fails.
pub(super) fn read_after(
    directory: impl AsFd,
    after: Option<&[u8]>,
    types: ListedTypes,
    limits: NameLimits,
    cancelled: CancelCheck<'_>,
    names: &mut DirectoryListing,
) -> Result<(), ReadError> {
    let directory = directory.as_fd();
    let after = after.unwrap_or_default();
    // Names are kept if the memory of the requester was reserved for them: helper processes, which
    // have no such limit, would each keep their own.
    let version = (2 * WINDOW_BYTES..usize::MAX)
        .contains(&limits.memory)
        .then(|| DirectoryVersion::of(directory, types))
        .flatten();
    if let Some(version) = version
        && !after.is_empty()
    {
        let kept = KEPT.lock().find(version, after, limits.count);
        if let Some(kept) = kept {
            names.push_after(&kept, after, limits.count);
            return Ok(());
        }
    }
    let seen = Cell::new(0_usize);
    let is_wanted = |name: &[u8], kind| {
        let is_later = after.is_empty() || order(name, after).is_gt();
        let is_wanted = is_later && types.include(kind);
        seen.set(seen.get() + usize::from(is_wanted));
        is_wanted
    };
    let window = match version {
        Some(_) => NameLimits {
            count: limits.count.max(WINDOW_NAMES),
            least: limits.count,
            ..limits
        },
        None => limits,
    };
    let mut read = DirectoryListing::default();
    let outcome = read_first(directory, window, cancelled, is_wanted, &mut read);
    read.sort();
    names.push_after(&read, after, limits.count);
    if let Some(directory) = version
        && outcome.is_ok()
        && read.len() > limits.count.max(MIN_NAMES)
    {
        KEPT.lock().keep(KeptNames {
            directory,
            after: after.to_vec(),
            is_complete: read.len() == seen.get(),
            names: Arc::new(read),
            used: Instant::now(),
        });
    }
    outcome
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::sync::atomic::AtomicU64;

    use exec_server_protocol::fs::WalkOptions;

    use super::*;
    use crate::fs::FsError;
    use crate::fs::directory::{ListingFields, read_directory, read_page};
    use crate::fs::page::ListingPage;

    /// Serializes the tests of this module: all use the same kept names.
    static ONE: Mutex<()> = Mutex::new(());

    /// The names of a page, and whether the directory was read for it.
    fn page(
        path: &std::path::Path,
        after: &str,
        count: usize,
        memory: usize,
    ) -> (Vec<String>, bool) {
        let checks = AtomicU64::new(0);
        let cancelled = || {
            checks.fetch_add(1, Ordering::Relaxed);
            false
        };
        let limits = NameLimits {
            count,
            least: count,
            memory,
        };
        let mut names = DirectoryListing::default();
        let directory = File::open(path).unwrap();
        let after = (!after.is_empty()).then_some(after.as_bytes());
        let types = ListedTypes::All;
        read_after(&directory, after, types, limits, &cancelled, &mut names).unwrap();
        let names = names.iter();
        let names = names.map(|(name, _)| name.to_str().unwrap().to_owned());
        (names.collect(), checks.into_inner() > 0)
    }

    fn directory(count: usize) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for number in 0..count {
            File::create(directory.path().join(format!("{number:05}"))).unwrap();
        }
        directory
    }

    #[test]
    fn pages_after_the_first_use_names_that_were_read_before() {
        const MEMORY: usize = 16 << 20;
        let _one = ONE.lock();
        let directory = directory(3000);
        let (first, is_read) = page(directory.path(), "", 1000, MEMORY);
        assert!(is_read && first.len() == 1000, "{}", first.len());
        assert!(kept_names_bytes() > 3000 * 5);
        let (second, is_read) = page(directory.path(), "00999", 1000, MEMORY);
        assert!(!is_read);
        assert_eq!((&*second[0], &*second[999]), ("01000", "01999"));
        let (last, is_read) = page(directory.path(), "02500", 1000, MEMORY);
        assert!(!is_read && last.len() == 499, "{}", last.len());
        // A new listing reads the directory again, and so does one of a directory that has changed.
        assert!(page(directory.path(), "", 1000, MEMORY).1);
        fs::remove_file(directory.path().join("02000")).unwrap();
        let (after, is_read) = page(directory.path(), "01999", 1000, MEMORY);
        assert!(is_read && after[0] == "02001", "{}", after[0]);
    }

    #[test]
    fn names_are_not_kept_for_requests_without_reserved_memory() {
        let _one = ONE.lock();
        let directory = directory(3000);
        for memory in [1 << 20, usize::MAX] {
            assert!(page(directory.path(), "", 1000, memory).1);
            assert!(page(directory.path(), "00999", 1000, memory).1);
        }
    }

    #[test]
    fn listing_that_needs_more_memory_than_allowed_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        for n in 0..200 {
            fs::write(dir.path().join(format!("a-file-with-a-name-{n}")), "").unwrap();
        }
        let page = ListingPage::of(Some(150), None).unwrap().unwrap();
        let fields = ListingFields::default();
        let list = |memory| {
            let whole = read_directory(dir.path(), fields, memory, &|| false);
            let paged = read_page(dir.path(), fields, &page, memory, &|| false);
            [whole, paged].map(|found| found.map(|found| found.len()))
        };
        assert!(matches!(list(64 * 1024), [Ok(200), Ok(150)]));
        for refused in list(2000) {
            assert!(matches!(refused, Err(FsError::ListingMemory(2000))));
        }
        let options = WalkOptions {
            max_depth: 1,
            max_directories: 10,
            max_entries: 1000,
            follow_directory_symlinks: false,
            prune_hidden_directories: false,
        };
        let walk = |memory| crate::fs::walk(dir.path(), options, memory, &|| false);
        assert!(walk(64 * 1024).is_ok());
        assert!(matches!(walk(2000), Err(FsError::ListingMemory(2000))));
    }

    #[test]
    fn kept_names_are_bounded_and_expire() {
        let _one = ONE.lock();
        let mut kept = AllKeptNames {
            listings: VecDeque::new(),
            // No thread that would change the global ones.
            has_thread: true,
        };
        let mut names = DirectoryListing::default();
        for number in 0..100_000 {
            names.push(
                format!("a name of a file {number}").as_bytes(),
                EntryType::File,
            );
        }
        names.sort();
        let names = Arc::new(names);
        for inode in 0..20 {
            kept.keep(KeptNames {
                directory: DirectoryVersion {
                    device: 1,
                    inode,
                    modified: (0, 0),
                    types: ListedTypes::All,
                },
                after: Vec::new(),
                is_complete: true,
                names: Arc::clone(&names),
                used: Instant::now(),
            });
        }
        assert!(kept.bytes() <= ALL_BYTES, "{}", kept.bytes());
        assert!(kept.listings.len() > 1);
        assert!(kept.listings.iter().all(|one| one.directory.inode > 10));
        kept.listings.clear();
        kept.count();
    }
}
