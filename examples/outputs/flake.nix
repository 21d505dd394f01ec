# Packages with several outputs that refer to each other and to other packages at run time, so that a
# cache has to hold whole closures: the `dev` output of `library` names its `lib`, `lib` names the package
# `data`, and `tool` names only the outputs it needs. Only /bin/sh is needed, no network.
{
  description = "Several outputs with runtime references";

  outputs =
    { self }:
    let
      systems = [ "x86_64-linux" "aarch64-linux" "x86_64-darwin" "aarch64-darwin" ];
      forEachSystem = make:
        builtins.listToAttrs (map (system: { name = system; value = make system; }) systems);
    in
    {
      packages = forEachSystem (
        system:
        let
          package = name: attributes: script:
            derivation (
              attributes
              // {
                inherit name system;
                builder = "/bin/sh";
                args = [ "-c" script ];
              }
            );
        in
        rec {
          data = package "data" { } ''
            echo "some data" > $out
          '';
          # `out` is the documentation and stands alone; `self` shows a reference of an output to itself.
          library = package "library" { inherit data; outputs = [ "out" "dev" "lib" ]; } ''
            echo "documentation" > $out
            echo "self=$lib data=$data" > $lib
            echo "lib=$lib" > $dev
          '';
          # Needs `dev` to build and keeps only `lib`.
          tool = package "tool" { library = library.dev; } ''
            read -r line < $library
            echo "linked with ''${line#lib=}" > $out
          '';
          default = tool;
        }
      );

      checks = forEachSystem (system: {
        linked = derivation {
          name = "linked";
          inherit system;
          inherit (self.packages.${system}) tool;
          inherit (self.packages.${system}.library) lib;
          builder = "/bin/sh";
          args = [
            "-c"
            ''
              read -r line < $tool
              [ "$line" = "linked with $lib" ] || exit 1
              echo ok > $out
            ''
          ];
        };
      });
    };
}
