# The smallest flake that builds: one package and one check that reads it. No inputs and no nixpkgs, only
# /bin/sh and what it has built in, so it builds on any machine with Nix, also without network.
{
  description = "One package, one check";

  outputs =
    { self }:
    let
      systems = [ "x86_64-linux" "aarch64-linux" "x86_64-darwin" "aarch64-darwin" ];
      forEachSystem = make:
        builtins.listToAttrs (map (system: { name = system; value = make system; }) systems);
    in
    {
      packages = forEachSystem (system: rec {
        hello = derivation {
          name = "hello";
          inherit system;
          builder = "/bin/sh";
          args = [ "-c" "echo 'building hello'; echo 'Hello, world!' > $out" ];
        };
        default = hello;
      });

      checks = forEachSystem (system: {
        greeting = derivation {
          name = "greeting";
          inherit system;
          inherit (self.packages.${system}) hello;
          builder = "/bin/sh";
          args = [
            "-c"
            ''
              read -r line < $hello
              if [ "$line" != 'Hello, world!' ]; then
                echo "unexpected greeting: $line"
                exit 1
              fi
              echo "$line" > $out
            ''
          ];
        };
      });
    };
}
