//! Errors of path mappings between two machines.

use std::path::PathBuf;

/// Reason why a path has no counterpart on the other machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// A root must be an absolute path.
    #[error("a root must be an absolute path, not `{}`", .0.display())]
    RelativeRoot(PathBuf),
    /// The path is relative, and there is no base directory.
    #[error("`{}` is not an absolute path", .0.display())]
    Relative(PathBuf),
    /// A policy has a pattern below this root, but the root is not valid UTF-8.
    #[error("the remote root `{}` is not valid UTF-8, which a pattern of a policy below it requires", .0.display())]
    NotText(PathBuf),
    /// The local path is outside of the mapped tree.
    #[error(
        "`{}` is outside of the local root `{}`, so it has no counterpart below the remote root `{}`",
        path.display(), local.display(), remote.display()
    )]
    OutsideLocal {
        /// The path that was given.
        path: PathBuf,
        /// The root that the path must be below.
        local: PathBuf,
        /// The remote root that corresponds to the local root.
        remote: PathBuf,
    },
    /// The remote path is outside of the mapped tree.
    #[error(
        "`{}` is outside of the remote root `{}`, so it has no counterpart below the local root `{}`",
        path.display(), remote.display(), local.display()
    )]
    OutsideRemote {
        /// The path that was given.
        path: PathBuf,
        /// The root that the path must be below.
        remote: PathBuf,
        /// The local root that corresponds to the remote root.
        local: PathBuf,
    },
}
